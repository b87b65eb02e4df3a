"""A model's folder from a stranger: nothing outside it is read, written or deleted, whatever it says."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import sandbox
from dualprompt import ContinualLearner
from sandbox import World, call, pictures
from serving import serving

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from dualprompt.errors import DualPromptError
from dualprompt.files import held, write_json
from dualprompt.hosted.jobs import Job, Jobs
from dualprompt.hosted.model import ServedModel
from dualprompt.hosted.places import JobFolders
from dualprompt.hosted.teach import Learned, Reporter, teach
from dualprompt.inbound.limits import Limits
from dualprompt.model import versions

JOB = asdict(Job(1, None, ["elm"], 9))


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A folder beside the model that no server may touch, named so that a careless one would take it for a job's."""
    folder = tmp_path / "precious"
    for name in ("letter.txt", "000001/images/000001.png", "000007/lesson.json", "photos/a.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


async def _nothing() -> None:
    pass


def recovered(model: Path) -> dict[int, Job]:
    """The jobs that a server finds when it starts."""

    async def start() -> dict[int, Job]:
        served = ServedModel(model, "cpu")
        try:
            jobs = Jobs(served, Limits(), _nothing)
            jobs._recover()
            return jobs.jobs
        finally:
            served.close()

    return asyncio.run(start())


def put_on_record(model: Path, *jobs: dict[str, Any], following: Any = 8) -> None:
    (model / ".serve" / "jobs").mkdir(parents=True, exist_ok=True)
    (model / ".serve" / "jobs.json").write_text(json.dumps({"next": following, "jobs": jobs}))


@pytest.mark.parametrize("state", ["queued", "running", "done", "failed"])
@pytest.mark.parametrize("number", ["PRECIOUS", "../../../precious", "1", 0, -1, 1.5, True, None, [1], 10**30])
def test_a_job_is_known_by_a_number_and_nothing_else(model: Path, precious: Path, number: Any, state: str):
    before = sandbox.contents(precious)
    number = str(precious) if number == "PRECIOUS" else number
    put_on_record(model, JOB | {"id": number, "state": state, "attempts": 9})
    assert recovered(model) == {}
    assert sandbox.contents(precious) == before


@pytest.mark.parametrize(
    "change",
    [{"state": "lost"}, {"attempts": "9"}, {"progress": float("nan")}, {"classes": "elm"}, {"loss": [1]}, {"error": 7}],
)
def test_a_record_of_another_kind_is_forgotten_as_a_whole(model: Path, change: dict[str, Any]):
    put_on_record(model, JOB | {"id": 2, "state": "done"}, JOB | change)
    assert recovered(model) == {}


def test_a_next_number_that_is_none_and_nested_records_are_forgotten(model: Path):
    for following in ("../precious", 1.5, 10**30, -3):
        put_on_record(model, JOB | {"state": "failed"}, following=following)
        assert recovered(model) == {}
    (model / ".serve" / "jobs.json").write_text("[" * 200_000)
    assert recovered(model) == {}


@pytest.mark.parametrize(
    "place", [".serve", ".serve/jobs", ".serve/jobs/000001", ".serve/jobs/000001/images", ".serve/jobs.json"]
)
def test_links_in_the_servers_folder_are_refused(model: Path, precious: Path, place: str):
    before = sandbox.contents(precious)
    link = model / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(precious / "letter.txt" if place.endswith("json") else precious)
    with pytest.raises(DualPromptError, match="is a link"):
        recovered(model)
    assert sandbox.contents(precious) == before
    assert link.is_symlink()
    link.unlink()
    recovered(model)


def test_pipes_and_very_deep_folders_are_refused_and_never_waited_for(model: Path):
    (model / ".serve").mkdir()
    os.mkfifo(model / ".serve" / "jobs.json")
    with pytest.raises(DualPromptError, match=r"jobs\.json is a link, a device"):
        recovered(model)
    (model / ".serve" / "jobs.json").unlink()
    deep = model / ".serve" / "jobs" / "000001"
    deep.joinpath(*"a" * 900).mkdir(parents=True)
    with pytest.raises(DualPromptError, match="too deep"):
        recovered(model)


def test_only_numbered_folders_of_the_server_are_cleared_away(model: Path):
    root = model / ".serve" / "jobs"
    for name in ("000003/images", "mine", "000", "000000", "1234567890"):
        (root / name).mkdir(parents=True)
    (root / "000004").write_text("a file")
    recovered(model)
    assert sorted(path.name for path in root.iterdir()) == ["000", "000000", "000004", "1234567890", "mine"]


def test_the_folder_of_a_job_follows_no_link(tmp_path: Path, precious: Path):
    before = sandbox.contents(precious)
    folders = JobFolders(tmp_path / "jobs")
    folders.make(1).joinpath("images", "a").symlink_to(precious)
    (folders.root / "000002").symlink_to(precious)
    folders.remove(1)
    folders.remove(2)
    assert sandbox.contents(precious) == before
    assert not folders.of(1).exists()
    for number in (0, -1, "000001", "/", True, 1.0):
        with pytest.raises(ValueError, match="no job has the number"):
            folders.remove(number)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("file", ["../../../../secret.png", "/SECRET", "000001.png/../../x.png", "", "a.png"])
def test_a_lesson_names_no_pictures_from_elsewhere(world: World, model: Path, tmp_path: Path, file: str):
    secret = Path(shutil.copy(pictures(world, "elm")[0], tmp_path / "secret.png"))
    job = model / ".serve" / "jobs" / "000001"
    (job / "images").mkdir(parents=True)
    file = str(secret) if file == "/SECRET" else file
    lesson = {"name": None, "epochs": 1, "again": False, "pictures": {"elm": [[file, "a"]]}}
    write_json(job / "lesson.json", lesson)
    before = sandbox.contents(model)
    with (tmp_path / "told").open("w") as told, pytest.raises(DualPromptError, match=r"lesson\.json is damaged"):
        teach(model, job, Reporter(told))
    assert sandbox.contents(model) == before


def test_a_damaged_mark_is_no_proof_that_a_job_has_learned(model: Path):
    put_on_record(model, JOB | {"state": "running", "attempts": 1})
    job = model / ".serve" / "jobs" / "000001"
    job.mkdir()
    (job / "lesson.json").write_text("{}")
    for mark in ("{", "[]", '{"id": "1", "learned": 2}', "[" * 100_000):
        (job / "learned.json").write_text(mark)
        assert recovered(model)[1].state == "queued"


@pytest.mark.parametrize("saved_more", [True, False])
@pytest.mark.parametrize("then", [(), ("rename", "birch", "Beech"), ("forget", "birch")])
def test_a_job_that_adds_images_is_not_done_twice_nor_lost(
    saved_more: bool, then: tuple[str, ...], world: World, model: Path
):
    """Its process was killed right after it said what it would save, or right after it saved; then came a command."""
    learner = ContinualLearner.load(model, "cpu")
    number = versions.listed(model)[-1].number
    [task] = learner.more({"ash": pictures(world, "ash", "test")})
    put_on_record(model, JOB | {"state": "running", "attempts": 1, "kind": "more", "classes": ["ash"]})
    job = model / ".serve" / "jobs" / "000001"
    job.mkdir()
    (job / "lesson.json").write_text("{}")
    write_json(job / "learned.json", asdict(Learned(task.id, task.learned, number + 1, task.images)))
    if saved_more:
        learner.save(model)
    if then:
        assert call(then[0], model, *then[1:]).code == 0
    assert recovered(model)[1].state == ("done" if saved_more else "queued")
    if saved_more:  # a mark of a release that noted no images
        put_on_record(model, JOB | {"state": "running", "attempts": 1, "kind": "more", "classes": ["ash"]})
        job.mkdir(exist_ok=True)
        write_json(job / "learned.json", {"id": task.id, "learned": task.learned, "version": number + 1})
        assert recovered(model)[1].state == "done"


@pytest.mark.anyio
async def test_a_hostile_record_does_not_keep_a_server_from_its_work(model: Path, precious: Path):
    put_on_record(model, JOB | {"id": str(precious)})
    async with serving(model) as client:
        assert (await client.get("/jobs")).json() == []
        assert (await client.get("/healthz")).status_code == 200


def test_a_lock_is_not_made_through_a_link(tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DualPromptError, match=r"cannot be written"), held(folder, "busy"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_files_are_not_written_through_a_link_that_waits_for_their_draft(tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".a.json.{os.getpid()}.partial").symlink_to(victim)
    write_json(tmp_path / "a.json", {"b": 1})
    assert victim.read_text() == "mine"
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": 1}


def test_learning_does_not_work_in_a_linked_folder(world: World, model: Path, precious: Path):
    (precious / ".a.partial").write_text("mine")
    before = sandbox.contents(precious)
    model.with_name(".model.learning").symlink_to(precious)
    told = sandbox.call("learn", model, world.images / "train" / "elm", "--epochs", "1").error
    assert "is a link" in told
    assert sandbox.contents(precious) == before
