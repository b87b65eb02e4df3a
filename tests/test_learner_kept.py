"""A learner on disk: saved, moved, shared, damaged, killed while it learns, held by one command at a time."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualprompt.backbones.known import REPLACED
from dualprompt.errors import DualPromptError
from dualprompt.learner import ContinualLearner
from dualprompt.model import saved, versions
from learning import ALL, FLAGS, TASKS, TINY, empty, trees
from sandbox import World, call, contents, start, write_weights


def test_a_backbone_may_move(world: World, kept: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    shutil.copy(world.weights, old)
    learner = ContinualLearner(str(old), "dualprompt", options=TINY, device="cpu")
    learner.learn({"ash": trees(world, "ash"), "elm": trees(world, "elm")}, epochs=1)
    model = learner.save(tmp_path / "model")
    assert str(tmp_path) not in (model / "README.md").read_text()  # it may be pushed
    expected = learner.predict(trees(world, "ash"))
    old.rename(new)
    assert f"dualprompt info {model} --backbone PLACE" in call("predict", model, trees(world, "ash")[0]).error
    assert call("info", model, "--backbone", new).code == 0
    assert ContinualLearner.load(model).predict(trees(world, "ash")) == expected


def test_a_card_that_cannot_be_written_is_told_and_the_model_saved(
    kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Path(shutil.copytree(kept, tmp_path / "model"))
    (model / "README.md").unlink()
    (model / "README.md").mkdir()
    learner = ContinualLearner.load(model)
    learner.forget("elm")
    learner.save(model)
    assert "its card is not" in caplog.text
    assert "elm" not in ContinualLearner.load(model).classes


def test_two_commands_do_not_make_one_model(world: World, folders: dict[str, Path], tmp_path: Path) -> None:
    work = tmp_path / ".model.learning"
    work.mkdir()
    with saved.held(work):
        made = call("learn", tmp_path / "model", folders["spring"], "--backbone", world.weights, *FLAGS)
    assert f"{tmp_path / 'model'} is being learned by another command" in made.error
    assert ".learning" not in made.error
    assert call("learn", tmp_path / "model", folders["spring"], "--backbone", world.weights, *FLAGS).code == 0
    assert not work.exists()


def test_a_refused_lesson_leaves_nothing(world: World, folders: dict[str, Path], kept: Path, tmp_path: Path) -> None:
    model, new = Path(shutil.copytree(kept, tmp_path / "model")), tmp_path / "deep" / "new"
    (model / ".lock").touch()
    before = contents(tmp_path)
    assert "does not exist" in call("learn", new, tmp_path / "nowhere", "--backbone", world.weights, *FLAGS).error
    assert "are known already" in call("learn", model, folders["spring"]).error
    assert (
        "gone.safetensors does not exist"
        in call("learn", new, folders["spring"], "--backbone", tmp_path / "gone.safetensors").error
    )
    assert contents(tmp_path) == before
    assert not new.parent.exists()


def test_nothing_of_the_images_stays(world: World, folders: dict[str, Path], tmp_path: Path) -> None:
    cache = Path(os.environ["DUALPROMPT_CACHE"])
    before = contents(cache)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(temporary))
        learner = empty(world)
        learner.learn(folders["spring"])
        learner.predict(folders["spring"])
    assert contents(cache) == before
    assert list(temporary.iterdir()) == []
    kept = contents(learner.save(tmp_path / "model"))
    assert sorted(Path(name).suffix for name in kept) == [".json", ".md", ".safetensors"]
    # The largest things that are kept for a task are as large whatever the number of images.
    few = {label: trees(world, label, split="train")[:3] for label in TASKS["spring"]}
    other = empty(world)
    other.learn(few)
    sizes = [{name: tuple(v.shape) for name, v in each._model.method.state().items()} for each in (learner, other)]
    assert sizes[0] == sizes[1]


def test_a_model_of_another_backbone_is_refused(world: World, kept: Path, tmp_path: Path) -> None:
    write_weights(tmp_path / "other.safetensors", seed=4)
    with pytest.raises(DualPromptError, match="another backbone"):
        ContinualLearner.load(kept, backbone=str(tmp_path / "other.safetensors"))
    shutil.copy(world.weights, tmp_path / "moved.safetensors")
    moved = ContinualLearner.load(kept, backbone=str(tmp_path / "moved.safetensors"))
    images = trees(world, "ash")
    assert moved.predict(images) == ContinualLearner.load(kept).predict(images)


def test_a_model_of_an_embedded_backbone_that_was_replaced_is_refused(kept: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(kept, tmp_path / "old"))
    facts = json.loads((path / "model.json").read_text())
    for sha256, named in REPLACED.items():
        old = {"name": "embedded", "sha256": sha256, "input_size": None}
        (path / "model.json").write_text(json.dumps(facts | {"backbone": old}))
        before = contents(path)
        error = call("predict", path, tmp_path).error
        assert f"{path} was made with an embedded backbone ({named})" in error
        assert error.endswith("has replaced; learn its classes again, or keep the version that made it")
        assert contents(path) == before


def test_what_is_no_model_is_refused(kept: Path, tmp_path: Path) -> None:
    def broken(name: str, change: Any) -> Path:
        path = tmp_path / name
        shutil.copytree(kept, path)
        change(path)
        return path

    def with_facts(**facts: Any) -> Any:
        def change(path: Path) -> None:
            said = json.loads((path / "model.json").read_text())
            (path / "model.json").write_text(json.dumps(said | facts))

        return change

    def short(path: Path) -> None:
        tensors = next(path.glob("weights-*"))
        tensors.write_bytes(tensors.read_bytes()[:-1])

    (tmp_path / "file").touch()
    cases = [
        (tmp_path / "nowhere", "does not exist; make one with `dualprompt learn"),
        (tmp_path / "file", "is not a folder"),
        (tmp_path, "holds no model"),
        (broken("half", lambda path: (path / "model.json").unlink()), "holds no model"),
        (broken("no-tensors", lambda path: next(path.glob("weights-*")).unlink()), "cannot be read"),
        (broken("short", short), "wrong SHA-256"),
        (broken("text", lambda path: (path / "model.json").write_text("{")), "is damaged"),
        (broken("foreign", lambda path: (path / "model.json").write_text('{"a": 1}')), "of another program"),
        (broken("list", lambda path: (path / "model.json").write_text("[]")), "of another program"),
        (broken("newer", with_facts(format=2)), "has format 2, this version of dualprompt reads 1"),
        (broken("escape", with_facts(tensors={"file": "../x", "sha256": ""})), "is damaged"),
        (broken("rows", with_facts(rows=[7])), "is damaged"),
        (broken("tasks", with_facts(tasks=[{"id": 1}])), "is damaged"),
        (broken("method", with_facts(method={"name": "dualprompt", "bogus": 1})), "unknown key 'method.bogus'"),
    ]
    for path, message in cases:
        with pytest.raises(DualPromptError, match=message) as error:
            ContinualLearner.load(path)
        assert "\n" not in str(error.value)
    with pytest.raises(DualPromptError, match="holds no model, but"):
        ContinualLearner.load(kept).save(tmp_path)


def test_a_full_disk_leaves_the_old_model(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    shutil.copytree(kept, path)
    learner = ContinualLearner.load(path)
    learner.forget("elm")
    before = contents(path) | {".lock": b""}
    flush = os.fsync
    for allowed in range(3):  # the tensors, then the old model.json among the versions, then the new one
        left = [allowed]

        def full(handle: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            flush(handle)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(DualPromptError, match="the disk is full"):
            learner.save(path)
        monkeypatch.setattr(os, "fsync", flush)
        assert contents(path) == before
    learner.save(path)
    assert "elm" not in ContinualLearner.load(path).classes
    assert {file.name[:7] for file in path.iterdir()} == {".lock", "README.", "model.j", "version", "weights"}


def test_push_and_pull(kept: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    remote = tmp_path / "remote"
    asked: list[Any] = []

    def create_repo(repo_id: str, **options: Any) -> None:
        asked.append((repo_id, options["private"]))

    def upload_folder(*, repo_id: str, folder_path: Path, delete_patterns: str, **_: Any) -> str:
        for old in remote.glob(delete_patterns):
            old.unlink()
        shutil.copytree(folder_path, remote, dirs_exist_ok=True)
        return f"https://hub/{repo_id}"

    monkeypatch.setattr(huggingface_hub, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub, "upload_folder", upload_folder)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, **_: str(remote))
    learner = ContinualLearner.load(kept)
    assert learner.push("me/trees") == "https://hub/me/trees"
    assert asked == [("me/trees", True)]
    images = trees(world, *ALL)
    assert ContinualLearner.pull("me/trees").predict(images) == learner.predict(images)

    assert call("push", kept, "me/trees", "--public", "--json").json["url"] == "https://hub/me/trees"
    assert asked[-1] == ("me/trees", False)
    assert not (remote / "versions").exists()
    pulled = tmp_path / "pulled"
    told = call("pull", "me/trees", pulled, "--json")
    assert told.json["classes"] == list(ALL), told.err
    assert ContinualLearner.load(pulled).predict(images) == learner.predict(images)
    assert call("forget", pulled, "ash").code == 0
    assert call("pull", "me/trees", pulled).code == 0  # what was there is an earlier version
    assert [version.why for version in versions.listed(pulled)][1:] == ["forgot a class", "pulled from me/trees"]
    with saved.held(pulled):
        assert "is being served" in call("pull", "me/trees", pulled).error
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    assert "holds no model, but 'letter.txt'" in call("pull", "me/trees", tmp_path / "other").error

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("403 Forbidden\nmore")

    monkeypatch.setattr(huggingface_hub, "create_repo", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(DualPromptError, match=r"the hub's repository 'me/trees': .*403"):
        learner.push("me/trees")
    assert "the hub's repository 'me/trees': OSError: 403 Forbidden" in call("push", kept, "me/trees").error
    assert "the hub's repository 'me/trees': OSError: 403 Forbidden" in call("pull", "me/trees", tmp_path / "new").error
    monkeypatch.undo()
    assert "'./trees' is no repository of the hub" in call("push", kept, "./trees").error  # nor is the hub asked
    assert not (tmp_path / "new").exists()


def digest_of(model: Path) -> str:
    facts = json.loads((model / "model.json").read_text())
    assert hashlib.sha256((model / facts["tensors"]["file"]).read_bytes()).hexdigest() == facts["tensors"]["sha256"]
    return facts["tensors"]["sha256"]


def test_killed_learning_goes_on_to_the_same_model(world: World, folders: dict[str, Path], tmp_path: Path) -> None:
    def learn(model: Path, **options: Any) -> Any:
        model.parent.mkdir(exist_ok=True)
        flags = ["--backbone", world.weights, "--device", "cpu", "--checkpoint.every_seconds", 0, *FLAGS]
        words = ["learn", model, folders["spring"], *flags]
        return start(model.with_name(f"{model.name}.log"), *words, watch=model.parent, **options)

    whole = learn(tmp_path / "whole" / "model")
    assert whole.end() == 0, whole.text
    changes = whole.changes
    assert sum("progress" in change for change in changes) > 4  # checkpoints inside the task
    assert not list((tmp_path / "whole").glob(".*.learning"))
    for number, at in enumerate(np.linspace(2, len(changes), 8).astype(int)):
        model = tmp_path / f"killed{number}" / "model"
        life = learn(model, at=int(at))
        assert life.end() == -signal.SIGKILL, life.text
        if (model / "model.json").exists():  # then it is whole
            assert digest_of(model) == digest_of(tmp_path / "whole" / "model")
            continue
        life = learn(model)
        assert life.end() == 0, life.text
        assert digest_of(model) == digest_of(tmp_path / "whole" / "model")
        assert not list(model.parent.glob(".*.learning"))


def test_work_of_other_images_is_not_taken_up(world: World, folders: dict[str, Path], tmp_path: Path) -> None:
    learner, other = empty(world), empty(world)
    learner.learn(folders["spring"], work=tmp_path)
    other.learn(folders["summer"], work=tmp_path)
    plain = empty(world)
    plain.learn(folders["summer"])
    images = trees(world, "cedar", "elm")
    assert other.predict(images) == plain.predict(images)
    assert len(list(tmp_path.iterdir())) == 2


def test_commands(world: World, folders: dict[str, Path], tmp_path: Path) -> None:
    model, picture = tmp_path / "model", trees(world, "ash")[0]
    made = call("learn", model, folders["spring"], "--backbone", world.weights, "--device", "cpu", *FLAGS, "--json")
    assert made.code == 0, made.err
    assert made.json["learned"]["classes"] == ["ash", "birch"]
    told = call("learn", model, folders["summer"], "--name", "hot [red]", "--epochs", 1)
    assert told.code == 0, told.err
    assert "hot [red]" in told.out
    assert "learned task 2 ('hot [red]'): 2 classes from 13 images" in told.out
    refused = call("learn", model, folders["summer"]).error
    assert "classes cedar, elm are known already" in refused
    assert "`more`" in refused
    assert "--backbone is for a new model" in call("learn", model, folders["autumn"], "--backbone", "embedded").error
    assert "--train.lr is for a new model" in call("learn", model, folders["autumn"], "--train.lr", 1).error

    answers = call("predict", model, picture, world.images / "test" / "elm", "--json").json
    assert [answer["path"] for answer in answers] == [str(picture), *map(str, trees(world, "elm"))]
    answers = call("predict", model, picture, "--top-k", 2, "--json").json
    expected = ContinualLearner.load(model).predict(picture, top_k=2)
    assert answers[0] == json.loads(json.dumps(expected.to_dict()))
    assert set(answers[0]) >= {"path", "label", "probability", "task", "top"}
    assert set(answers[0]["top"][0]) == {"label", "probability"}
    lines = call("predict", model, picture, "--csv", "--top-k", 2).out.splitlines()
    assert lines[0] == "path,label,probability,task,similarity,label_1,probability_1,label_2,probability_2"
    assert lines[1].startswith(f"{picture},{expected.label},{expected.probability:.6f},")
    assert expected.label in call("predict", model, picture).out

    (tmp_path / "broken.jpg").write_bytes(b"no image")
    mixed = call("predict", model, tmp_path / "broken.jpg", picture, "--json")
    assert mixed.code == 2
    assert [answer["path"] for answer in mixed.json] == [str(picture)]  # the others are not lost
    assert f"1 of 2 images: {tmp_path / 'broken.jpg'} cannot be read" in mixed.error
    assert "cannot go together" in call("predict", model, picture, "--json", "--csv").error

    judged = call("evaluate", model, folders["spring"], "--json").json
    assert judged["images"] == 13
    assert judged["accuracy"] == ContinualLearner.load(model).evaluate(folders["spring"]).accuracy
    assert "class 'fir' is not known" in call("evaluate", model, folders["autumn"]).error
    levels = call("calibrate", model, "--unknown", folders["autumn"], "--json").json["levels"]
    assert all(0 <= level["rejected"] <= 100 for level in levels)
    assert call("info", model, "--json").json["threshold"] is not None
    assert "every image gets a class" in call("calibrate", model, "--off").out
    assert "not allowed with" in call("calibrate", model, "--off", "--auto").error
    assert "--accept says how to measure" in call("calibrate", model, "--off", "--accept", 0.5).error
    assert "--unknown says how to measure" in call("calibrate", model, "--auto", "--unknown", folders["autumn"]).error
    assert call("info", model, "--json").json["threshold"] is None

    assert "forgot class 'ash'" in call("forget", model, "ash").out
    assert "forgot task 2" in call("forget", model, "2").out
    assert call("info", model, "--json").json["classes"] == ["birch"]
    assert "birch" in call("info", model).out
    assert "no task or class 'ash'" in call("forget", model, "ash").error
    assert "holds no model" in call("predict", tmp_path, picture).error


def test_who_changes_a_model_holds_it(world: World, folders: dict[str, Path], kept: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(kept, tmp_path / "model"))
    with saved.held(model):
        for command in (
            ("learn", model, folders["spring"], "--again"),
            ("forget", model, "ash"),
            ("calibrate", model),
            ("evaluate", model, folders["spring"], "--record"),
        ):
            assert "is being served, or changed by another command" in call(*command).error
        assert call("evaluate", model, folders["spring"]).code == 0  # whoever only looks is welcome
        assert call("predict", model, trees(world, "ash")[0]).code == 0
        learner = ContinualLearner.load(model)
        learner.forget("ash")
        with pytest.raises(DualPromptError, match="is being served"):
            learner.save(model)
        learner.save(model, held=True)
    assert call("forget", model, "--class", "elm").code == 0
    assert "ash" not in ContinualLearner.load(model).classes
