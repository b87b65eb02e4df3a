"""Versions of a model: what is kept of earlier ones, going back, and what stays of what was forgotten."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from dualprompt.errors import DualPromptError
from dualprompt.learner import ContinualLearner
from dualprompt.model import saved, versions
from sandbox import World, call, contents, pictures, start

METHOD = "ridge"  # which takes no training


@pytest.fixture(scope="module")
def taught(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two tasks and two versions."""
    path = tmp_path_factory.mktemp("taught") / "model"
    learner = ContinualLearner(str(world.weights), METHOD, device="cpu")
    learner.learn({name: pictures(world, name) for name in ("ash", "birch")}, "first")
    learner.save(path)
    learner.learn({name: pictures(world, name) for name in ("cedar", "elm")}, "second")
    return learner.save(path)


@pytest.fixture
def model(taught: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(taught, tmp_path / "model"))


def answers(path: Path, world: World) -> Any:
    images = [image for name in ("ash", "birch", "cedar", "elm") for image in pictures(world, name, "test")]
    return ContinualLearner.load(path, "cpu").predict(images)


def numbers(path: Path) -> list[int]:
    return [version.number for version in versions.listed(path)]


def test_each_change_is_a_version_that_can_be_gone_back_to(model: Path, world: World) -> None:
    before = answers(model, world)
    first, second = versions.listed(model)
    assert (first.number, first.why, first.classes, first.current) == (1, "learned 'first'", ("ash", "birch"), False)
    assert (second.number, second.tasks, second.current) == (2, ("first", "second"), True)
    assert call("forget", model, "elm").code == 0
    went = versions.rollback(model, device="cpu")
    assert (went.number, went.why, went.classes) == (4, "went back to version 2", ("ash", "birch", "cedar", "elm"))
    assert answers(model, world) == before
    assert "elm" in (model / "README.md").read_text()
    again = versions.rollback(model, device="cpu")  # undoes that
    assert "elm" not in again.classes
    told = call("rollback", model, 1, "--json")
    assert told.code == 0, told.err
    assert ContinualLearner.load(model).classes == ("ash", "birch")
    learner = ContinualLearner.load(model, "cpu")
    assert learner.learn({"yew": pictures(world, "fir")}).id == 3  # 2 was given, whatever became of it


def test_a_model_whose_tensors_are_gone_can_be_gone_back_from(model: Path) -> None:
    tensors = model / json.loads((model / "model.json").read_text())["tensors"]["file"]
    tensors.unlink()
    assert "go back to an earlier version with `dualprompt rollback" in call("info", model).error
    assert versions.listed(model)[-1].bytes == 0
    done = call("rollback", model)
    assert done.code == 0, done.err
    assert call("info", model).code == 0
    shutil.rmtree(model / "versions")
    next(model.glob("weights-*")).write_bytes(b"x")
    assert "damaged" in (said := call("info", model).error)
    assert "rollback" not in said


@pytest.mark.parametrize("content", ["", "{}", "null", '{"format": 1}', "cut", "half", "folder", "pipe", None])
def test_a_model_whose_papers_are_damaged_can_be_gone_back_from(content: str | None, model: Path, world: World) -> None:
    assert call("versions", model, "--keep", 3).code == 0
    assert call("forget", model, "elm").code == 0
    papers = model / "model.json"
    whole, tensors = papers.read_text(), {file.name for file in model.glob("weights-*")}
    damaged = {"cut": whole[:-40], "half": whole[: len(whole) // 2], "folder": None, "pipe": None}.get(
        content or "", content
    )
    papers.unlink() if damaged is None else papers.write_text(damaged)
    if content == "folder":
        papers.mkdir()
    elif content == "pipe":
        os.mkfifo(papers)
    said = call("info", model).error
    assert "model.json is damaged" in said or "has lost its model.json" in said
    assert f"or go back to an earlier version with `dualprompt rollback {model} 2`" in said
    done = call("rollback", model)
    assert done.code == 0, done.err
    assert "went back to version 2, which is now version 4" in done.out
    assert "is kept as" in done.out
    learner = ContinualLearner.load(model, "cpu")
    assert learner.classes == ("ash", "birch", "cedar", "elm")
    assert learner.predict(pictures(world, "ash", "test"))
    assert json.loads(papers.read_text())["version"]["keep"] == 3
    assert learner.learn({"yew": pictures(world, "fir")}).id > 3  # the damaged one may have given 3
    aside = model / "model.json.damaged"
    if damaged is not None:
        assert aside.read_text() == damaged
    assert call("forget", model, "birch").code == 0  # what was set aside stays, and so do its tensors
    assert {file.name for file in model.glob("weights-*")} >= tensors
    papers.write_text(whole)  # someone has found a copy, or mended it by hand
    assert ContinualLearner.load(model, "cpu").classes == ("ash", "birch", "cedar")


def test_what_is_damaged_again_is_set_aside_beside_the_first(model: Path) -> None:
    assert call("forget", model, "elm").code == 0
    for content in ("{", "["):
        (model / "model.json").write_text(content)
        assert call("rollback", model).code == 0
    assert (model / "model.json.damaged").read_text() == "{"
    assert (model / "model.json.damaged.1").read_text() == "["
    assert call("forget", model, "elm", "--purge").code == 0  # what was set aside may hold it
    assert list(model.glob("model.json.*")) == []
    named = {json.loads(file.read_text())["tensors"]["file"] for file in model.rglob("*.json")}
    assert {file.name for file in model.glob("weights-*")} == named


def test_what_a_damaged_model_says_of_ids_is_heeded(model: Path) -> None:
    copy = json.loads((model / "model.json").read_text())
    for said, free in ((17, 17), (2**53 - 1, 2**53 - 1), (10**16 - 1, 2**53 - 1)):
        (model / "model.json").write_text('{"format": 1, "next_id": ' + str(said) + ', "tr')
        assert call("rollback", model).code == 0
        assert json.loads((model / "model.json").read_text())["next_id"] == free
        (model / "model.json").write_text(json.dumps(copy))


def test_a_copy_that_is_damaged_too_does_not_keep_from_the_others(model: Path) -> None:
    for new in ("Ash", "Esche"):
        assert call("rename", model, "Ash" if new == "Esche" else "ash", new).code == 0
    (model / "model.json").write_text("{")
    (model / "versions" / "000003.json").write_text("{")
    assert f"rollback {model} 2`" in call("info", model).error
    assert "no version 3; earlier versions: 1, 2" in call("rollback", model, 3).error
    assert call("rollback", model, 2).code == 0
    assert "ash" in ContinualLearner.load(model, "cpu").classes


def test_a_folder_of_somebody_is_no_model_that_has_lost_its_papers(model: Path, tmp_path: Path) -> None:
    project = tmp_path / "thesis"
    (project / "versions").mkdir(parents=True)
    (project / "README.md").write_text("my thesis")
    (project / "versions" / "20240101.json").write_text('{"a": 1}')
    with pytest.raises(DualPromptError, match="holds no model, but"):
        ContinualLearner.load(model, "cpu").save(project)
    assert "holds no model" in call("rollback", project).error
    assert (project / "README.md").read_text() == "my thesis"


def test_saving_onto_a_damaged_model_keeps_what_it_had(model: Path) -> None:
    learner = ContinualLearner.load(model, "cpu")
    assert call("versions", model, "--keep", 20).code == 0
    for number in range(8):
        assert call("rename", model, "ash" if number == 0 else f"ash{number - 1}", f"ash{number}").code == 0
    (model / "model.json").write_text("{")
    learner.save(model)
    assert numbers(model) == [*range(1, 10), 11]
    assert json.loads((model / "model.json").read_text())["version"]["keep"] == 20
    assert call("forget", model, "elm", "--purge").code == 0
    assert not (model / "model.json.damaged").exists()  # it may hold what is to be gone


def test_a_damaged_model_without_versions_cannot_be_gone_back_from(model: Path) -> None:
    shutil.rmtree(model / "versions")
    (model / "model.json").write_text("{")
    assert "rollback" not in call("info", model).error
    assert "no earlier version" in call("rollback", model).error
    (model / "model.json").unlink()
    assert "holds no model" in call("rollback", model).error


def test_unchanged_tensors_cost_nothing_and_old_ones_go(model: Path) -> None:
    files = {file.name for file in model.glob("weights-*")}
    assert len(files) == 2
    for n in range(4):
        assert call("rename", model, f"ash{n}" if n else "ash", f"ash{n + 1}").code == 0
    assert {file.name for file in model.glob("weights-*")} == files
    assert numbers(model) == [1, 2, 3, 4, 5, 6]  # five, and the model itself
    assert call("rename", model, "ash4", "ash").code == 0
    assert numbers(model) == [2, 3, 4, 5, 6, 7]
    assert len(list(model.glob("weights-*"))) == 1  # that of the first version is gone
    told = call("versions", model, "--keep", 1, "--json").json
    assert [version["number"] for version in told["versions"]] == [6, 7]
    assert told["bytes"] == next(model.glob("weights-*")).stat().st_size
    assert call("rename", model, "ash", "rowan").code == 0
    assert numbers(model) == [7, 8]
    ContinualLearner.load(model).save(model)  # of which nothing is changed
    assert numbers(model) == [7, 8]
    learner = ContinualLearner.load(model)
    learner.rename("rowan", "sorb")
    learner.forget("sorb")
    learner.save(model, versions=0)
    assert not (model / "versions").exists()
    assert not any(name in everything(model) for name in ("rowan", "sorb"))


def everything(path: Path) -> str:
    texts = [file.read_text() for file in path.rglob("*") if file.suffix in (".json", ".md")]
    return "".join(texts)


def test_purging_leaves_nothing_of_what_is_forgotten(model: Path) -> None:
    assert call("rename", model, "elm", "wych").code == 0
    told = call("forget", model, "wych")
    assert (
        f"earlier versions still hold it, so that it can be undone; for good: dualprompt forget {model} wych"
        in told.out
    )
    assert "elm" in everything(model)
    assert "no task or class 'wych'" in call("forget", model, "wych").error
    told = call("forget", model, "wych", "--purge", "--json")  # it was forgotten before
    assert told.json["purged"] == [2, 3]  # under either name
    assert numbers(model) == [1, 4]
    assert not any(name in everything(model) for name in ("elm", "wych"))
    assert len(list(model.glob("weights-*"))) == 2
    told = call("forget", model, "first", "--purge")
    assert "removed 2 earlier versions that held it" in told.out
    assert numbers(model) == [5]
    assert "birch" not in everything(model)
    assert [file.name for file in model.glob("weights-*")] == [saved.record(model).tensors.file]


@pytest.mark.parametrize("command", [("forget", "elm"), ("forget", "elm", "--purge"), ("rollback",)])
def test_a_command_that_is_killed_leaves_whole_versions(taught: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    """At every change to the folder the model is the old one or the new, and every version can be gone back to."""

    def begun(name: str, at: int | None) -> tuple[Path, int]:
        model = Path(shutil.copytree(taught, tmp_path / name))
        words = (command[0], model, *command[1:], "--device", "cpu")
        life = start(tmp_path / f"{name}.log", *words, watch=model, at=at)
        code = life.end()
        assert code == (0 if at is None else -signal.SIGKILL), life.text
        return model, len(life.changes) if at is None else at

    old = ContinualLearner.load(taught).classes
    done, count = begun("done", None)
    new = ContinualLearner.load(done).classes
    assert count > 8
    for at in range(1, count + 1):
        model, _ = begun(f"killed{at}", at)
        *earlier, current = versions.listed(model)
        assert current.classes in (old, new)
        assert ContinualLearner.load(model, "cpu").classes == current.classes
        if "--purge" not in command:
            assert ("ash", "birch") in {version.classes for version in earlier}
        for version in earlier:
            versions.rollback(model, version.number, device="cpu")
            assert ContinualLearner.load(model, "cpu").classes == version.classes
        if "--purge" in command:
            assert call(*("forget", model, "elm", "--purge", "--device", "cpu")).code in (0, 2)
            assert "elm" not in everything(model)
        assert not [file for file in model.rglob("*") if file.suffix == ".partial"]


def test_a_server_keeps_others_from_going_back(model: Path) -> None:
    with saved.held(model):
        assert "is being served, or changed" in call("rollback", model).error
        assert "is being served, or changed" in call("versions", model, "--keep", 2).error
        assert call("versions", model).code == 0
    assert call("rollback", model).code == 0


def test_what_cannot_be_gone_back_to_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    assert "there is no version 7; earlier versions: 1" in call("rollback", model, 7).error
    assert "it is the model now; earlier versions: 1" in call("rollback", model, 2).error
    assert "can be kept, found -1" in call("versions", model, "--keep=-1").error
    assert "holds no model" in call("rollback", tmp_path).error
    assert list(tmp_path.iterdir()) == [model]
    assert call("versions", model, "--keep", 0).code == 0
    assert "no earlier version" in call("rollback", model).error


def damage(name: str, model: Path, elsewhere: Path) -> None:
    copy = model / "versions" / "000001.json"
    facts = json.loads(copy.read_text())
    match name:
        case "a link to a folder":
            shutil.move(model / "versions", elsewhere / "versions")
            (model / "versions").symlink_to(elsewhere / "versions")
        case "a link to a file":
            shutil.move(copy, elsewhere / "copy.json")
            copy.symlink_to(elsewhere / "copy.json")
        case "a pipe":
            copy.unlink()
            os.mkfifo(copy)
        case "no JSON":
            copy.write_text("{")
        case "a huge number":
            copy.write_text(json.dumps(facts | {"version": facts["version"] | {"number": 10**30}}))
        case "another number":
            copy.write_text(json.dumps(facts | {"version": facts["version"] | {"number": 9}}))
        case "another file":
            copy.write_text(json.dumps(facts | {"tensors": facts["tensors"] | {"file": "../../secret"}}))
        case "other tensors":
            (model / facts["tensors"]["file"]).write_bytes(b"other")
        case "no tensors":
            (model / facts["tensors"]["file"]).unlink()


STRANGE = ("a link to a folder", "a link to a file", "a pipe", "no JSON", "a huge number", "another number")


@pytest.mark.parametrize("name", [*STRANGE, "another file", "other tensors", "no tensors"])
def test_versions_of_a_stranger_are_refused_and_nothing_elsewhere_changes(
    name: str, model: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.txt").write_text("mine")
    damage(name, model, elsewhere)
    before, classes = contents(elsewhere), ContinualLearner.load(model).classes
    assert str(model) in call("rollback", model, 1).error
    call("rename", model, "ash", "rowan")
    call("versions", model, "--keep", 0)
    assert contents(elsewhere) == before
    assert len(ContinualLearner.load(model).classes) == len(classes)


def test_a_hostile_number_of_the_model_is_refused(model: Path) -> None:
    facts = json.loads((model / "model.json").read_text())
    (model / "model.json").write_text(json.dumps(facts | {"version": facts["version"] | {"number": 10**9 - 1}}))
    assert "no more are counted" in call("rename", model, "ash", "rowan").error
    assert "ash" in ContinualLearner.load(model).classes
    (model / "model.json").write_text(json.dumps(facts | {"version": facts["version"] | {"keep": 10**9}}))
    with pytest.raises(DualPromptError, match=r"version\.keep"):
        ContinualLearner.load(model)
