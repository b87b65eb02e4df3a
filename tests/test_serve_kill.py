"""A server that is killed: the next one finds the old model or the new one, and takes the work up again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sandbox import COMMAND, World, forked, pictures
from serving import SMALL, files, lesson, uploads

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from dualprompt.hosted.jobs import Jobs  # noqa: E402
from dualprompt.hosted.model import ServedModel  # noqa: E402
from dualprompt.hosted.teach import Lesson, Reporter, teach  # noqa: E402
from dualprompt.inbound.limits import Limits  # noqa: E402
from dualprompt.inbound.pictures import Picture  # noqa: E402
from dualprompt.learner import ContinualLearner  # noqa: E402


def prepare_job(world: World, model: Path, *names: str, epochs: int = 1) -> tuple[Path, int]:
    """Put a job on record as a server does, and stop before it runs; return its folder and id."""

    async def prepare() -> tuple[Path, int]:
        served = ServedModel(model, "cpu")
        jobs = Jobs(served, Limits(), _nothing)
        async with jobs.room() as folder:
            found = []
            for name in names:
                for path in pictures(world, name):
                    copy = folder / "images" / f"{len(found):06}.png"
                    shutil.copy(path, copy)
                    found.append(Picture(name, f"{name}/{path.name}", copy))
            job = jobs.add(folder, found, Lesson("third", epochs, False, {}))
        job.state, job.attempts = "running", 1
        jobs._save()
        served.close()
        return folder, job.id

    return asyncio.run(prepare())


async def _nothing() -> None:
    pass


def _teach(model: str, job: str, log: str, at: int) -> None:
    """Learn a job; SIGKILL hits right before the `at`-th change to the model's files."""

    torch.set_num_threads(1)
    changes: list[str] = []

    def count(event: str, details: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.link"):
            return
        path = str(details[0])
        if not path.startswith(model) or (event == "open" and details[1] in (None, "r", "rb")):
            return
        there = Path(path).exists()
        if "/work" in path or (event == "os.mkdir" and there) or (event == "os.remove" and not there):
            return  # what learning itself keeps there matters to nobody else; the others change nothing
        changes.append(f"{event} {path}")
        if len(changes) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        teach(Path(model), Path(job), Reporter(nowhere))
    Path(log).write_text("\n".join(changes))


def teach_until(model: Path, job: Path, log: Path, at: int) -> int:
    """Learn in a process of its own; return its exit code."""
    process = forked(_teach, str(model), str(job), str(log), at)
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def test_killed_at_any_change_to_the_model_the_next_server_finds_the_old_or_the_new(
    world: World, saved: Path, tmp_path: Path
):
    complete = tmp_path / "complete"
    shutil.copytree(saved, complete)
    first, _ = prepare_job(world, complete, "elm")
    assert teach_until(complete, first, tmp_path / "log", at=-1) == 0
    changes = (tmp_path / "log").read_text().split("\n")
    assert len(changes) > 3
    old, new = ("ash", "birch", "cedar"), ("ash", "birch", "cedar", "elm")
    probe = [path for name in old for path in pictures(world, name, "test")]
    expected = ContinualLearner.load(saved, "cpu").predict(probe)
    outcomes = []
    for at in range(1, len(changes) + 1):
        model = tmp_path / f"model-{at}"
        shutil.copytree(saved, model)
        folder, number = prepare_job(world, model, "elm")
        shutil.copytree(first / "work", folder / "work")  # it need not be learned each time: what follows matters
        assert teach_until(model, folder, tmp_path / "log", at) == -signal.SIGKILL, changes[at - 1]

        async def restart(model: Path = model, number: int = number) -> tuple[Any, ...]:
            served = ServedModel(model, "cpu")
            jobs = Jobs(served, Limits(), _nothing)
            jobs._recover()
            found = (tuple(served.learner.classes), jobs.jobs[number].state, served.learner.predict(probe))
            served.close()
            return found

        classes, state, answers = asyncio.run(restart())
        assert (classes, state) in ((old, "queued"), (new, "done")), changes[at - 1]
        if classes == old:
            assert [answer.to_dict() for answer in answers] == [answer.to_dict() for answer in expected]
            assert (folder / "lesson.json").exists()
        else:
            assert not folder.exists()
        outcomes.append(state)
    assert outcomes == sorted(outcomes, reverse=True)  # "queued" until the switch, "done" from then on
    assert outcomes[0] == "queued"


@contextlib.contextmanager
def server(model: Path) -> Iterator[tuple[Any, subprocess.Popen[str]]]:
    """Run the installed command; yield a client that may do everything, and the process."""
    command = [COMMAND, "serve", str(model), "--port", "0", "--json", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout
        text = "".join(iter(process.stdout.readline, "}\n")) + "}"
        told = json.loads(text)
        assert told["page"] == f"{told['url']}/#token={told['token']}"
        shown = {"authorization": f"Bearer {told['token']}"}
        with httpx.Client(base_url=told["url"], timeout=60, headers=shown) as client:
            yield client, process
    finally:
        process.kill()
        process.wait()


def test_a_killed_server_takes_the_job_up_again(world: World, model: Path):
    with server(model) as (client, process):
        reply = client.post("/tasks", files=lesson(world, "elm"), data={"epochs": "3"})
        job = reply.json()["id"]
        until(lambda: client.get(f"/jobs/{job}").json()["state"] == "running")
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert uploads(model)
    with server(model) as (client, _):
        assert client.post("/predict", files=files(pictures(world, "ash", "test")[0])).status_code == 200
        until(lambda: client.get(f"/jobs/{job}").json()["state"] == "done")
        assert client.get("/model").json()["classes"] == ["ash", "birch", "cedar", "elm"]
    assert uploads(model) == []


def test_a_job_interrupted_too_often_fails_and_its_images_go(world: World, model: Path):
    folder, number = prepare_job(world, model, "elm")
    record = model / ".serve" / "jobs.json"
    found = json.loads(record.read_text())
    found["jobs"][0]["attempts"] = 2
    record.write_text(json.dumps(found))
    stray = folder.with_name("000099")
    (stray / "images").mkdir(parents=True)
    (stray / "images" / "a.png").write_bytes(SMALL)

    async def restart() -> Any:
        served = ServedModel(model, "cpu")
        jobs = Jobs(served, Limits(), _nothing)
        jobs._recover()
        served.close()
        return jobs.jobs[number]

    job = asyncio.run(restart())
    assert (job.state, job.images) == ("failed", 7)
    assert "interrupted" in job.error
    assert uploads(model) == []


def until(done: Any, seconds: float = 60) -> None:
    """Wait until something is so."""
    for _ in range(int(seconds / 0.05)):
        if done():
            return
        time.sleep(0.05)
    raise AssertionError("it never came")
