"""Files that are made to hurt, of other types, of something else or cut off: each is refused in one line."""
# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shutil
import threading
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random
from types import NoneType
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dualprompt.backbones import weights
from dualprompt.config import compose
from dualprompt.errors import DualPromptError
from dualprompt.learner import ContinualLearner
from dualprompt.methods.base import METHODS, method_config
from dualprompt.model import saved
from dualprompt.pictures.kinds import Grid, as_plain
from dualprompt.report.build import report
from dualprompt.run import checkpoint
from hostile import finished, looks_at, mutated, outcome, stopped, study, uses_model
from sandbox import World, call
from test_vit_parity import random_google


def with_facts(model: Path, **facts: Any) -> None:
    said = json.loads((model / "model.json").read_text())
    (model / "model.json").write_text(json.dumps(said | facts))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"photos": {"/etc/hostname": "mine"}}, "'photos"),
        ({"photos": {"../letter.txt": "mine"}}, "'photos"),
        ({"photos": {"absent.png": "gone"}}, "absent.png cannot be read"),
        ({"study": "../../out"}, "'study'"),
        ({"pictures": {"../out": {"kind": "points", "title": "", "clouds": []}}}, "'pictures"),
        ({"pictures": {"out": {"kind": "points", "title": "", "clouds": []}}}, "has points"),
        (
            {"pictures": {"none": as_plain(Grid("a", "x", "y", ["1"], ["2"], [[None]]))}},
            "a number in one cell at least",
        ),
        ({"tables": [1]}, "'tables.0'"),
        ({"rows": {}}, "'rows'"),
        ({"finding": None}, "'finding'"),
    ],
)
def test_study_json_of_other_types(facts: dict[str, Any], said: str, study: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(study, tmp_path / "in" / "study"))
    (tmp_path / "in" / "letter.txt").write_text("mine")
    value = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(value | facts))
    assert said in call("report", folder, "--out", tmp_path / "page" / "report.html").error
    assert not list(tmp_path.rglob("*.html"))
    assert not list(tmp_path.rglob("out*"))


def test_a_study_with_long_names_is_drawn_and_runs_that_cannot_be_looked_at_are_not_there(study: Path) -> None:
    value, name = json.loads((study / "study.json").read_text()), "long name " * 90
    value["rows"] = [{"runs": [name]}]
    for picture in value["pictures"].values():
        picture |= {key: name for key in ("title", "x", "y", "unit") if key in picture}
        picture |= {key: [name] * len(picture[key]) for key in ("rows", "columns", "places") if key in picture}
        for part in picture.get("lines", []) + picture.get("clouds", []):
            part["name"] = name
    with mutated(study / "study.json", lambda *_: json.dumps(value).encode(), Random(0)):
        page = report([study], study.parent / "long" / "report.html")  # matplotlib's warnings are errors here
    assert "long name" in page.read_text()


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"threshold": "0.5"}, "'threshold'"),
        ({"threshold": True}, "'threshold'"),
        ({"rows": []}, "its rows are not those of its classes"),
        ({"tasks": [1]}, "'tasks.0'"),
        ({"next_id": 2}, "the ids of its tasks"),
        ({"trust": [[9, {"ash": [0.5]}]]}, "its trust is not in its classes"),
        ({"tensors": {"file": "../x", "sha256": "0" * 64}}, "'tensors.file'"),
    ],
)
def test_model_json_of_other_types(facts: dict[str, Any], said: str, model: Path) -> None:
    with_facts(model, **facts)
    message = call("info", model).error
    assert said in message
    assert "restore the model from a copy" in message


@pytest.mark.parametrize("name", METHODS.names())
def test_no_option_calls_for_all_memory(name: str) -> None:
    """A number of any size is refused, or it is one that no memory goes by."""
    kind = METHODS[name].Config
    for option, field in kind.model_fields.items():
        if field.annotation is int or set(get_args(field.annotation)) == {int, NoneType}:
            assert any(getattr(bound, "le", None) for bound in field.metadata), option
            refused = refusal(lambda option=option: method_config({"name": name, option: 10**12}))
            assert f"'method.{option}': input should be less than or equal to" in refused


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [("dualprompt-rp", "projection", 30_000), ("klda", "projection", 30_000), ("l2p", "pool_size", 9_999)],
)
def test_a_model_that_calls_for_more_than_its_tensors_is_refused_before_they_are_made(
    method: str, option: str, value: int, world: World, tmp_path: Path
) -> None:
    small = {"projection": 20, "e_layers": [2, 3]} if method == "dualprompt-rp" else {option: 20}
    learner = ContinualLearner(str(world.weights), method, options=small | {"train.epochs": 1}, device="cpu")
    learner.learn({name: sorted((world.images / "train" / name).iterdir()) for name in ("ash", "elm")})
    path = learner.save(tmp_path / "model")
    ContinualLearner.load(path, "cpu")
    with_facts(path, method=json.loads((path / "model.json").read_text())["method"] | {option: value})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "but its options call for" in refusal(lambda: ContinualLearner.load(path, "cpu"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB


def test_a_model_that_asks_for_huge_images(model: Path) -> None:
    backbone = json.loads((model / "model.json").read_text())["backbone"]
    with_facts(model, backbone=backbone | {"input_size": 8192})
    assert "less than or equal to 1024" in call("info", model).error
    with_facts(model, backbone=backbone | {"name": "/" + "x" * 300})
    assert "File name too long" in refusal(lambda: ContinualLearner.load(model))


def bomb() -> str:
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]" for n in range(12)]
    return "\n".join(levels)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (bomb(), "more than 10,000 values"),
        ("a: &a [*a]", "more than 10,000 values"),
        ("seed: 2026-99-99", "month must be in 1..12"),
        ("[" * 100_000, "nested more than 32 deep"),
        ("a: !!bool x", "not valid YAML"),
        ("a: " + "x" * 300_000, "more than 262,144 bytes"),
    ],
)
def test_yaml_that_is_made_to_hurt(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert said in call("run", tmp_path / "mine.yaml", "--out", tmp_path / "out").error
    if len(text) < 100_000:
        assert "cannot read the value" in call("run", "mini", "--train.epochs", f"{{{text}}}").error


def test_aliases_that_are_needed_are_read(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "benchmark: {dataset: mini-shapes}\ntrain: &t {epochs: 7}\nmethods: {l2p: {train: *t}}"
    )
    assert compose(str(tmp_path / "mine.yaml"), None, {"method.name": "l2p"}).train.epochs == 7


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_that_is_nested_deeply(opening: str, finished: Path, model: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    for name in ("manifest.json", "group.json", "result.json"):
        (run / name).write_text(opening * 100_000)
        assert f"{run / name} is damaged" in call("show", run).error
        shutil.copy(finished / name, run / name)
    (model / "model.json").write_text(opening * 100_000)
    assert "is damaged" in call("info", model).error


@pytest.mark.parametrize(
    "key",
    [
        *("average_accuracy", "forgetting", "mean_over_steps", "learning_accuracy", "task_known_accuracy"),
        "calibration_error",
    ],
)
def test_a_result_that_contradicts_its_own_matrix(key: str, finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    result = json.loads((run / "result.json").read_text())
    better = result[key] + 1 if result[key] < 50 else result[key] - 1
    (run / "result.json").write_text(json.dumps(result | {key: better}))
    said = call("show", run).error
    assert f"result.json is damaged ('{key}' is {better:.10g}, but {result[key]:.10g} by what it is made of)" in said
    (run / "result.json").write_text(json.dumps(result | {key: result[key] + 1e-9}))  # another way to round
    assert call("show", run).code == 0


def test_an_archive_that_declares_more_than_it_holds(tmp_path: Path) -> None:
    arrays = random_google(dim=16, heads=2, depth=1, mlp=8, patch=4, grid=2)
    huge = io.BytesIO()
    np.lib.format.write_array_header_1_0(huge, {"descr": "<f4", "fortran_order": False, "shape": (50_000, 50_000)})
    np.savez(tmp_path / "vit.npz", **arrays)
    with zipfile.ZipFile(tmp_path / "vit.npz", "a") as archive:
        archive.writestr("pre/kernel.npy", huge.getvalue())
    assert "says that it is larger than it is" in refusal(lambda: weights.read(str(tmp_path / "vit.npz")))
    bomb: dict[str, Any] = arrays | {"pre/kernel": np.zeros(2**26, np.float32)}
    np.savez_compressed(tmp_path / "bomb.npz", **bomb)
    assert "far more than it holds" in refusal(lambda: weights.read(str(tmp_path / "bomb.npz")))


def test_views_that_stand_for_more_than_the_file_holds(world: World, tmp_path: Path) -> None:
    state = load_file(world.weights)
    state["norm.weight"] = torch.zeros(1).expand(10**6, 10**6)
    torch.save(state, tmp_path / "vit.pth")
    assert "far more numbers than it holds" in refusal(lambda: weights.read(str(tmp_path / "vit.pth")))


@pytest.mark.parametrize("value", [-1, 0, 2, "x", None])
def test_a_wrong_epsilon(value: Any, world: World, tmp_path: Path) -> None:
    shutil.copy(world.weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2, "layer_norm_eps": value}))
    assert str(tmp_path / "config.json") in refusal(lambda: weights.read(str(tmp_path)))


def said_at_last(*arguments: object) -> str:
    """The line with which a command ends that had begun to work."""
    found = call(*arguments)
    assert found.code == 2
    assert "Traceback" not in found.err
    last = found.err.splitlines()[-1]
    assert last.startswith("dualprompt: error: ")
    return last


def refusal(read: Callable[[], Any]) -> str:
    with pytest.raises(DualPromptError) as error:
        read()
    return str(error.value)


def test_a_log_that_lost_its_end(stopped: Path, finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    log = run / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:-20])
    assert f"of {log} is cut off" in call("report", run).error
    run = Path(shutil.copytree(stopped, tmp_path / "stopped"))
    log = run / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:10])
    assert "its end is missing" in said_at_last("resume", run)
    log.unlink()
    assert call("resume", run).code == 0


def test_a_checkpoint_with_one_bit_changed(stopped: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    path = run / "checkpoints" / "task-0001.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert "its checksum is wrong" in said_at_last("resume", run)


def test_checkpoints_of_another_run(stopped: Path, world: World, tmp_path: Path) -> None:
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    position = checkpoint.read(run / "checkpoints" / "task-0001.safetensors")[1]
    checkpoint.write(run / "checkpoints" / "task-0001.safetensors", {"other": torch.zeros(3)}, asdict(position))
    assert "are not those of this run" in said_at_last("resume", run)


def test_files_of_a_model_and_a_run_that_are_something_else(model: Path, finished: Path, tmp_path: Path) -> None:
    """Folders, pipes, links that lead nowhere or in a circle, empty files, where files should be."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    names = ("manifest.json", "group.json", "result.json", "metrics.jsonl", "checkpoints/task-0001.safetensors")
    targets: dict[Path, Callable[[], Any]] = {run / name: lambda: looks_at(run) for name in names}
    targets |= {path: lambda: uses_model(model) for path in (model / "model.json", next(model.glob("weights-*")))}
    wrong: tuple[Callable[[Path], Any], ...] = (
        Path.mkdir,
        os.mkfifo,
        Path.touch,
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("/dev/zero"),
    )
    for path, read in targets.items():
        kept = tmp_path / "kept"
        path.rename(kept)
        for make in wrong:
            make(path)
            outcome(read)
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        kept.rename(path)
        read()


def test_pipes_and_devices_are_no_pictures(model: Path, world: World, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with (tmp_path / "sparse.png").open("wb") as sparse:
        sparse.truncate(2**40)
    for path, said in (
        (tmp_path / "pipe.png", "no file"),
        ("/dev/zero", "no file"),
        (tmp_path / "sparse.png", "more than"),
    ):
        assert said in call("predict", model, path).error
    lesson = Path(shutil.copytree(world.images / "train" / "elm", tmp_path / "lesson" / "elm")).parent
    shutil.copytree(world.images / "train" / "fir", lesson / "fir")
    os.mkfifo(lesson / "elm" / "pipe.png")
    (lesson / "fir" / "zero.png").symlink_to("/dev/zero")
    assert call("learn", model, lesson, "--epochs", 1).code == 0  # what is no file is no picture


def test_names_of_files_with_line_breaks_stay_on_one_line(model: Path, tmp_path: Path) -> None:
    strange = tmp_path / "a\nb\x1b[31m.png"
    strange.write_bytes(b"none")
    assert "a\\nb\\x1b[31m.png" in call("predict", model, strange).error
    folder = tmp_path / "lesson"
    (folder / "two\nlines").mkdir(parents=True)
    shutil.copy(strange, folder / "two\nlines")
    assert "cannot be the name of a class" in call("learn", model, folder).error


def test_a_model_is_read_while_it_is_replaced(model: Path) -> None:
    """A reader who holds no lock always finds the old model or the new one."""
    learner = ContinualLearner.load(model, "cpu")
    seen: list[Any] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                seen.append(len(saved.read(model)[0].tasks))
            except DualPromptError as error:
                seen.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(30):
        name = f"head.bias.{number % 2}"
        dict(learner.network().named_parameters())[f"method.{name}"].data += 1  # other tensors, so another file
        learner.save(model)
    done.set()
    for reader in readers:
        reader.join()
    assert len(seen) > 30
    assert set(seen) == {2}


def test_what_fails_after_the_switch_is_no_failure(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = ContinualLearner.load(model, "cpu")
    learner.forget("cedar")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **_: refuse() if path.exists() else unlink(path, missing_ok=True))
    learner.save(model)
    monkeypatch.undo()
    assert "cedar" not in ContinualLearner.load(model, "cpu").classes
    assert len(list(model.glob("weights-*"))) == 2  # the old one stays until the next time


def test_everybody_may_read_what_they_may_read_of_a_model(model: Path) -> None:
    ContinualLearner.load(model, "cpu").save(model)
    assert next(model.glob("weights-*")).stat().st_mode == (model / "model.json").stat().st_mode
