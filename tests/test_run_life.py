"""What a run directory allows and refuses: resuming with something changed, resuming when done, running into it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dualprompt.backbones.known import REPLACED
from dualprompt.config import RunConfig, compose
from dualprompt.progress import Event, Note, Progress
from dualprompt.run.folder import Run
from dualprompt.run.identity import config_digest
from dualprompt.run.provenance import git_state, products
from dualprompt.training.group import plan, resume
from dualprompt.training.loop import train
from dualprompt.training.setup import prepare
from sandbox import VIT, World, call, contents, interrupted, make_world, remains, start, write_weights


@pytest.fixture(scope="module")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    done = call("run", world.preset, "--out", out)
    assert done.code == 0, done.err
    return out


def edit_manifest(world: World, run: Path) -> None:
    path = run / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["config"]["train"]["lr"] *= 2
    path.write_text(json.dumps(manifest))


def alter_image(world: World, run: Path) -> None:
    shutil.copyfile(world.images / "train" / "ash" / "1.png", world.images / "train" / "ash" / "0.png")


def add_image(world: World, run: Path) -> None:
    shutil.copyfile(world.images / "train" / "ash" / "1.png", world.images / "train" / "ash" / "another.png")


def rename_class(world: World, run: Path) -> None:
    for split in ("train", "test"):
        (world.images / split / "ash").rename(world.images / split / "alder")


def change_weights(world: World, run: Path) -> None:
    write_weights(world.weights, seed=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            edit_manifest,
            "the config in {run}/manifest.json was changed after the run began, or an older",
        ),
        (alter_image, "the data of run {run} changed since it began; restore the images or start a new run"),
        (add_image, "the data of run {run} changed since it began; restore the images or start a new run"),
        (rename_class, "the data of run {run} changed since it began; restore the images or start a new run"),
        (change_weights, "the weights of run {run} changed since it began; restore the weights file or start a new"),
    ],
)
def test_nothing_that_decides_the_result_may_change(
    change: Callable[[World, Path], None], message: str, tmp_path: Path
) -> None:
    world = make_world(tmp_path)
    run = interrupted(world, tmp_path / "run")
    change(world, run)
    before = contents(run)
    refused = call("resume", run)
    assert message.format(run=run) in refused.error
    assert refused.out == ""
    assert contents(run) == before


@pytest.mark.parametrize("command", ["resume", "eval"])
def test_a_run_of_an_embedded_backbone_that_was_replaced_is_refused(
    command: str, world: World, finished: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    if command == "resume":
        interrupted(world, run)
    else:
        shutil.copytree(finished, run)
    manifest = json.loads((run / "manifest.json").read_text())
    for sha256, named in REPLACED.items():
        manifest["config"]["backbone"]["name"] = "embedded"
        manifest["config"]["benchmark"]["dataset"] = "mini-of-old"  # its pictures need not be there any more
        digest = config_digest(RunConfig.model_validate(manifest["config"]))
        manifest["identity"] |= {"weights": sha256, "config": digest}
        (run / "manifest.json").write_text(json.dumps(manifest))
        before = contents(run)
        refused = call(command, run)
        assert refused.error == (
            f"run {run} began with an embedded backbone ({named}) that this version of dualprompt has replaced; "
            "start a new run, or go on with the version that began it"
        )
        assert contents(run) == before
    if command == "eval":
        assert call("show", run).code == 0, "its numbers stay readable"


def test_restored_data_are_the_same_data(world: World, finished: Path, tmp_path: Path) -> None:
    own = make_world(tmp_path)
    run = interrupted(own, tmp_path / "run")
    image = own.images / "test" / "elm" / "2.png"
    kept = image.read_bytes()
    image.write_bytes(b"")
    assert "cannot be read" in call("resume", run).error
    image.write_bytes(kept)
    assert call("resume", run).code == 0
    again, truth = remains(run), remains(finished)
    assert again["."]["state"] == truth["."]["state"]
    assert again["."]["log"] == truth["."]["log"]


def test_where_it_is_carried_out_may_change(world: World, finished: Path, tmp_path: Path) -> None:
    run = interrupted(world, tmp_path / "run")
    path = run / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["config"] |= {"device": "cuda", "checkpoint": {"every_seconds": 0}}
    path.write_text(json.dumps(manifest))
    assert call("resume", run, "--device", "cpu").code == 0
    assert remains(run) == remains(finished)


def test_resuming_a_finished_run_shows_it_again(finished: Path) -> None:
    before, shown = contents(finished), call("show", finished)
    again = call("resume", finished)
    assert (again.code, again.out, again.err) == (0, shown.out, "")
    assert "accuracy matrix of dualprompt" in again.out
    assert contents(finished) == before


def test_a_finished_run_needs_neither_its_data_nor_its_weights(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    assert call("run", world.preset, "--out", tmp_path / "run", "--no-baseline").code == 0
    shutil.rmtree(world.images)
    world.weights.unlink()
    assert call("resume", tmp_path / "run").code == 0
    assert call("show", tmp_path / "run").code == 0


def test_out_that_holds_a_run(world: World, finished: Path) -> None:
    before = contents(finished)
    error = call("run", world.preset, "--out", finished).error
    assert error == f"{finished} holds a run; continue it with `dualprompt resume {finished}`, or choose another --out"
    assert contents(finished) == before


def test_out_that_holds_something_else(world: World, tmp_path: Path) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter.tex").write_text("years of work")
    assert call("run", world.preset, "--out", out).error == f"{out} is not empty; choose another --out"
    assert contents(out) == {"chapter.tex": b"years of work"}
    file = out / "chapter.tex"
    assert "is a file; choose" in call("run", world.preset, "--out", file).error
    assert "cannot be written" in call("run", world.preset, "--out", file / "below").error
    assert contents(out) == {"chapter.tex": b"years of work"}


def test_an_unfinished_run_cannot_be_shown_or_judged(world: World, tmp_path: Path) -> None:
    run = interrupted(world, tmp_path / "run")
    before = contents(run)
    for command in ("show", "eval"):
        assert call(command, run).error == f"run {run} is not finished; continue it with: dualprompt resume {run}"
    assert contents(run) == before


@pytest.mark.parametrize("command", ["resume", "show", "eval"])
def test_no_run_there(command: str, tmp_path: Path) -> None:
    assert call(command, tmp_path).error == f"{tmp_path} is not a run directory (it has no manifest.json)"
    (tmp_path / "model.json").write_text("{}")
    shown = "evaluate" if command == "eval" else "info"  # a model is evaluated on images
    assert f"dualprompt {shown} {tmp_path}" in call(command, tmp_path).error
    absent = tmp_path / "absent"
    assert call(command, absent).error == f"{absent} does not exist; give the directory of a run"
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("name", ["manifest.json", "group.json", "result.json"])
@pytest.mark.parametrize("damage", [lambda text: text[:50], lambda text: "[]", lambda text: "{}"])
def test_damaged_papers(name: str, damage: Callable[[str], str], finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / name).write_text(damage((run / name).read_text()))
    for command in ("resume", "show"):
        assert f"{run / name} is damaged" in call(command, run).error


def test_several_seeds_are_resumed_together(world: World, tmp_path: Path) -> None:
    out, twin = tmp_path / "run", tmp_path / "twin"
    assert call("run", world.preset, "--out", twin, "--seeds", 2).code == 0
    life = start(
        tmp_path / "log", "run", world.preset, "--out", out, "--seeds", 2, watch=out, at="open seed-1/metrics.jsonl"
    )
    assert life.end() != 0
    assert (out / "seed-0" / "result.json").exists()
    assert "is not finished" in call("show", out).error
    assert call("resume", out).code == 0
    for seed in ("seed-0", "seed-1"):
        assert remains(out / seed) == remains(twin / seed)
    again = json.loads((out / "comparison.json").read_text())
    truth = json.loads((twin / "comparison.json").read_text())
    assert again["accuracy_matrix"] == truth["accuracy_matrix"]
    assert again["average_accuracy_std"] == truth["average_accuracy_std"]


def test_a_missing_checkpoint_of_a_finished_run(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    path = run / "checkpoints" / "task-0002.safetensors"
    path.unlink()
    assert call("eval", run).error == f"checkpoint {path} is missing; restore it or start a new run"


def test_weights_of_another_shape_are_other_weights(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    run = interrupted(world, tmp_path / "run")
    write_weights(world.weights, replace(VIT, depth=4))
    assert f"the weights of run {run} changed" in call("resume", run).error


class Notes(Progress):
    """Keeps the lines that stay."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def receive(self, event: Event) -> None:
        if isinstance(event, Note):
            self.texts.append(event.text)


def test_a_run_goes_on_with_the_threads_it_began_with(world: World, finished: Path, tmp_path: Path) -> None:
    run = interrupted(world, tmp_path / "run")
    notes = Notes()
    noted = notes.texts
    assert json.loads((run / "manifest.json").read_text())["threads"] == 1
    here = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Run(run).as_begun(notes):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        resume(run, notes)
    finally:
        torch.set_num_threads(here)
    assert noted[0] == f"{run} began with 1 of PyTorch's threads and keeps to that; the environment says 2"
    assert noted[0] in noted[1:]
    assert call("resume", run).code == 0
    left, truth = remains(run), remains(finished)
    assert left["."]["state"] == truth["."]["state"]
    assert left["."]["log"] == truth["."]["log"]
    manifest = json.loads((run / "manifest.json").read_text()) | {"threads": 65_000}
    (run / "manifest.json").write_text(json.dumps(manifest))
    with Run(run).as_begun(notes):
        assert torch.get_num_threads() == here
    assert "more than this machine has cores" in noted[-1]


def test_a_manifest_notes_which_library_multiplies(finished: Path, tmp_path: Path) -> None:
    copied, notes, here = tmp_path / "run", Notes(), products()
    shutil.copytree(finished, copied)
    manifest = json.loads((copied / "manifest.json").read_text())
    assert manifest["products"] == here
    other = {"oneDNN": "PyTorch", "PyTorch": "oneDNN"}[here]
    older = {key: value for key, value in manifest.items() if key != "products"}
    for noted in (manifest, manifest | {"products": other}, older):
        (copied / "manifest.json").write_text(json.dumps(noted))
        with Run(copied).as_begun(notes):
            assert products() == here
        assert Run(copied).identity == Run(finished).identity
    [told] = notes.texts
    assert told == (
        f"{copied} began where {other} multiplies frozen layers on a CPU; here {here} does, and last digits may differ"
    )


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two threads need two cores")
def test_ewc_begun_with_two_threads_ends_in_the_same_bits_where_one_is_the_rule(tmp_path: Path) -> None:
    """Its Fisher is a sum over images and tokens, whose last bits depend on how many threads share it."""
    world = make_world(tmp_path)
    write_weights(world.weights, replace(VIT, image_size=128, dim=64, heads=2, mlp_dim=128, depth=1))
    changes = {"method.name": "ewc", "train.epochs": 1, "train.lr": 0.001, "train.batch_size": 16}
    preset = world.preset_with("ewc.yaml", benchmark={"name": "tiny", "dataset": str(world.images), "tasks": 2})
    config = plan([compose(str(preset), None, changes | {"backbone.input_size": 128})], baseline=False)[0].config

    class StopError(Exception):
        pass

    def stop(_: int) -> None:
        raise StopError

    def state_after(name: str, threads: int, dies: bool = False) -> dict[str, torch.Tensor]:
        torch.set_num_threads(threads)
        setup = prepare(config)
        run = Run.create(tmp_path / name, config, setup.stream, setup.weights, setup.precision)
        with pytest.raises(StopError) if dies else nullcontext():
            train(setup, run, learned=stop if dies else None)
        if dies:
            torch.set_num_threads(1)
            resume(run.folder)
        return run.checkpoints.after_task(1)

    here = torch.get_num_threads()
    try:
        one, two, resumed = state_after("one", 1), state_after("two", 2), state_after("resumed", 2, dies=True)
    finally:
        torch.set_num_threads(here)
    assert any(not torch.equal(one[name], two[name]) for name in two)  # else there is nothing to see
    assert all(torch.equal(resumed[name], two[name]) for name in two)


def test_the_manifest_is_made_without_gits_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To refresh the index, `git status` locks it, and whoever commits at that moment fails."""
    git, asked = tmp_path / "git", tmp_path / "asked"
    git.write_text(f'#!/bin/sh\necho "$@" >> {asked}\necho x\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert git_state() == {"commit": "x", "changed_files": 1}
    assert all(line.startswith("--no-optional-locks ") for line in asked.read_text().splitlines())


def test_a_run_in_a_folder_whose_name_is_no_text(world: World, tmp_path: Path) -> None:
    """Names of files are bytes; what is written of them must be readable again."""
    run = tmp_path / "caf\udce9"
    assert call("run", world.preset, "--out", run, "--no-baseline", "--train.epochs", 1).code == 0
    (run / ".not-ours.partial").mkdir()
    assert call("resume", run).code == 0
    assert (run / ".not-ours.partial").is_dir()
