"""Folders of runs from a stranger: nothing outside of them is ever written, emptied or deleted."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from dualprompt.errors import DualPromptError
from dualprompt.files import cache_root, data_root, refuse_links, runs_root, with_home, write_text
from sandbox import World, call, contents, interrupted


@pytest.fixture(scope="module")
def begun(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its baseline that was stopped in the middle."""
    out = tmp_path_factory.mktemp("begun") / "run"
    return interrupted(world, out, "--checkpoint.every_seconds", 0, "--track", "tensorboard")


@pytest.fixture(scope="module")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    assert call("run", world.preset, "--out", out, "--train.epochs", 1).code == 0
    return out


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    folder = tmp_path / "precious"
    folder.mkdir()
    for name in ("letter.txt", "progress.safetensors", "events.out.tfevents.1", "manifest.json", ".a.partial"):
        (folder / name).write_text(f"my {name}")
    return folder


def trap(run: Path, place: str, precious: Path) -> None:
    """Put a link to what is precious into a run's folder, in place of what is there."""
    link = run / place
    if link.is_dir():
        if place == "checkpoints":  # the run's own files, elsewhere
            shutil.copytree(link, precious / "kept", dirs_exist_ok=True)
            precious = precious / "kept"
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(precious if "." not in place.rpartition("/")[2] else precious / "letter.txt")


@pytest.mark.parametrize(
    "place", ["checkpoints", "tensorboard", "wandb", "baseline", "metrics.jsonl", "tensorboard/events.out.tfevents.0"]
)
def test_a_run_with_a_link_in_it_is_not_continued(place: str, begun: Path, precious: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(begun, tmp_path / "run"))
    trap(run, place, precious)
    before = contents(precious)
    refused = call("resume", run)
    assert f"{run / place} is a link, a pipe or a device" in refused.error
    assert contents(precious) == before


@pytest.mark.parametrize("command", ["eval", "show", "report"])
@pytest.mark.parametrize("place", ["baseline", "report-files"])
def test_nor_judged_nor_shown_nor_reported(
    command: str, place: str, finished: Path, precious: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    trap(run, place, precious)
    before = contents(precious)
    assert f"{run / place} is a link" in call(command, run).error
    assert contents(precious) == before


def test_a_run_may_lie_behind_a_link_that_the_user_named(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(finished)
    assert call("show", tmp_path / "mine").code == 0


@pytest.mark.parametrize("place", ["aside", "run"])
def test_links_in_the_store_of_runs(place: str, world: World, precious: Path, tmp_path: Path) -> None:
    table = (
        "table",
        "main",
        "--benchmark",
        world.preset,
        "--methods",
        "simple-cil",
        "--seeds",
        1,
        "--runs",
        tmp_path / "runs",
    )
    assert call(*table).code == 0
    [run] = (tmp_path / "runs").glob("simple-cil-*")
    if place == "run":
        run.rename(precious / "run")
        run.symlink_to(precious / "run")
    else:
        (tmp_path / "runs" / "aside").symlink_to(precious)
    before = contents(precious)
    refused = call(*table, "--fresh")
    assert f"{run if place == 'run' else tmp_path / 'runs' / 'aside'} is a link" in refused.error
    assert contents(precious) == before


def test_what_is_refused_below_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").touch()
    refuse_links(tmp_path)
    refuse_links(tmp_path / "not there")
    (tmp_path / "a" / "wandb").mkdir()
    (tmp_path / "a" / "wandb" / "latest-run").symlink_to("run-1")  # as W&B does
    refuse_links(tmp_path)
    os.mkfifo(tmp_path / "a" / "b" / "pipe")
    with pytest.raises(DualPromptError, match="pipe is a link, a pipe or a device"):
        refuse_links(tmp_path)


def test_no_file_takes_the_place_of_a_pipe_or_a_device(model: Path, world: World, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to("pipe.png")
    image = next((world.images / "test" / "ash").iterdir())
    for name in ("pipe.png", "link.png"):
        refused = call("predict", model, image, "--explain", tmp_path / name)
        assert "is a pipe or a device" in refused.error
    assert stat.S_ISFIFO((tmp_path / "pipe.png").lstat().st_mode)
    assert (tmp_path / "link.png").is_symlink()
    for device in ("/dev/null", "/dev/stdout"):
        before = Path(device).lstat()
        with pytest.raises(DualPromptError, match="is a pipe or a device"):
            write_text(Path(device), "text")
        assert Path(device).lstat().st_ino == before.st_ino


def test_a_variable_that_is_empty_names_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CACHE", "DATA", "RUNS"):
        monkeypatch.setenv(f"DUALPROMPT_{name}", "")
    assert cache_root() == tmp_path / ".cache" / "dualprompt"
    assert data_root() == cache_root() / "data"
    assert runs_root() == Path("runs")


def test_a_home_that_nobody_has(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nobody = "~nobody-has-this-name/x"
    assert with_home(nobody) == Path(nobody)
    for words in (("predict", nobody, "a.jpg"), ("predict", model, nobody), ("watch", model, nobody, "--once")):
        assert nobody in call(*words).error
    facts = json.loads((model / "model.json").read_text())
    facts["backbone"]["name"] = nobody
    (model / "model.json").write_text(json.dumps(facts))
    assert nobody in call("info", model).error

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("DUALPROMPT_CACHE", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)  # as in a container whose user has no name
    with pytest.raises(DualPromptError, match=r"\$DUALPROMPT_CACHE"):
        cache_root()
    with pytest.raises(DualPromptError, match="cannot be written"):
        write_text(tmp_path, "text")  # the reason is told all the same
