"""The HTTP server: answers, batches, learns beside serving, forgets, refuses, and survives being killed."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from PIL import Image

import sandbox
from sandbox import COMMAND, World

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from dualprompt.errors import DualPromptError  # noqa: E402
from dualprompt.learner import ContinualLearner  # noqa: E402
from dualprompt.serve.app import create_app  # noqa: E402
from dualprompt.serve.batching import Batcher  # noqa: E402
from dualprompt.serve.guard import Rules  # noqa: E402
from dualprompt.serve.jobs import Job, Jobs  # noqa: E402
from dualprompt.serve.limits import Limits, Refusal  # noqa: E402
from dualprompt.serve.model import ServedModel  # noqa: E402
from dualprompt.serve.pictures import Picture, split_names  # noqa: E402
from dualprompt.serve.run import rules_for  # noqa: E402
from dualprompt.serve.service import Settings  # noqa: E402
from dualprompt.serve.teach import Reporter  # noqa: E402

pytestmark = pytest.mark.anyio
OPTIONS = {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3}
TOKEN = "a token of twenty-six letters"
SHOWN = {"authorization": f"Bearer {TOKEN}"}
HERE = "http://127.0.0.1"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def saved(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows ash and birch in one task, and cedar in another."""
    learner = ContinualLearner(str(world.weights), options=OPTIONS, device="cpu")
    learner.learn({name: pictures(world, name) for name in ("ash", "birch")}, "first", epochs=1)
    learner.learn({"cedar": pictures(world, "cedar")}, "second", epochs=1)
    return learner.save(tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def pictures(world: World, name: str, split: str = "train") -> list[Path]:
    return sorted((world.images / split / name).iterdir())


def png(width: int = 20, height: int = 20, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG")
    return file.getvalue()


def files(*paths: Path) -> list[tuple[str, tuple[str, bytes]]]:
    """Pictures as /predict takes them."""
    return [("images", (path.name, path.read_bytes())) for path in paths]


def lesson(world: World, *names: str) -> list[tuple[str, tuple[str, bytes]]]:
    """Pictures as /tasks takes them."""
    return [("images", (f"{name}/{path.name}", path.read_bytes())) for name in names for path in pictures(world, name)]


def archive(entries: dict[str, bytes], **options: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, **options) as opened:
        for name, content in entries.items():
            opened.writestr(name, content)
    return file.getvalue()


@contextlib.asynccontextmanager
async def serving(
    model: Path, *, limits: Limits | None = None, rules: Rules | None = None, **settings: Any
) -> AsyncIterator[Any]:
    """Run the application in this process; yield a client."""
    app = create_app(ServedModel(model, "cpu"), Settings(rules or Rules(TOKEN), limits or Limits(), **settings))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url=HERE, timeout=60, headers=SHOWN) as client,
    ):
        client.service = app.state.service
        yield client


async def finished(client: Any, job: int, seconds: float = 60) -> dict[str, Any]:
    """Wait until a job has ended."""
    for _ in range(int(seconds / 0.05)):
        found = (await client.get(f"/jobs/{job}")).json()
        if found["state"] in ("done", "failed"):
            return found
        await asyncio.sleep(0.05)
    raise AssertionError("the job does not end")


async def until_running(client: Any, job: int) -> int:
    """Wait until a job learns; return the id of its process."""
    for _ in range(600):
        process = client.service.jobs._process
        if client.service.jobs.jobs[job].state == "running" and process and process.returncode is None:
            return process.pid
        await asyncio.sleep(0.02)
    raise AssertionError(client.service.jobs.jobs[job])


def error_of(response: Any, status: int) -> str:
    """The message of a refusal: one line of JSON."""
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    assert "\n" not in response.json()["error"]
    return response.json()["error"]


def uploads(model: Path) -> list[Path]:
    """Everything of an upload that is left on disk."""
    return [path for path in (model / ".serve" / "jobs").rglob("*") if path.is_file()]


async def test_answers_are_the_learners(world: World, model: Path):
    asked = [path for name in ("ash", "birch", "cedar") for path in pictures(world, name, "test")]
    expected = ContinualLearner.load(model, "cpu").predict(asked, top_k=2)
    async with serving(model) as client:
        together = (await client.post("/predict?top_k=2", files=files(*asked))).json()["answers"]
        alone = [(await client.post("/predict?top_k=2", files=files(path))).json()["answers"][0] for path in asked]
    for path, one, other, answer in zip(asked, together, alone, expected, strict=True):
        assert one["path"] == path.name
        for found in (one, other):
            assert found["label"] == answer.label
            assert found["task"] == answer.task
            assert found["probability"] == pytest.approx(answer.probability, abs=1e-5)
            assert [score["label"] for score in found["top"]] == [score.label for score in answer.top]
            assert len(found["top"]) == 2


async def test_concurrent_requests_share_batches_and_each_gets_its_own_answer(world: World, model: Path):
    asked = [path for name in ("ash", "birch", "cedar") for path in pictures(world, name, "test")] * 3
    async with serving(model, largest_batch=1) as client:
        alone = [(await client.post("/predict", files=files(path))).json()["answers"][0] for path in asked]
        assert "dualprompt_batch_images_count 42.0" in (await client.get("/metrics")).text
    async with serving(model, largest_batch=8, batch_wait=0.2) as client:
        replies = await asyncio.gather(*(client.post("/predict", files=files(path)) for path in asked))
        metrics = (await client.get("/metrics")).text
    for one, reply in zip(alone, replies, strict=True):
        found = reply.json()["answers"][0]
        assert (found["path"], found["label"], found["task"]) == (one["path"], one["label"], one["task"])
        assert found["probability"] == pytest.approx(one["probability"], abs=1e-5)
    batches = int(float(metrics.split("dualprompt_batch_images_count ")[1].split("\n")[0]))
    assert 42 / 8 <= batches < 21
    assert "dualprompt_batch_images_sum 42.0" in metrics


async def test_a_batch_takes_what_came_while_the_network_was_busy():
    sizes: list[int] = []

    def compute(pixels: np.ndarray, top_k: Any) -> list[int]:
        time.sleep(0.05)
        return [int(picture[0, 0, 0]) * 10 + k for picture, k in zip(pixels, top_k, strict=True)]

    batcher = Batcher(compute, largest=4, observe=sizes.append)
    batcher.start()
    first = asyncio.create_task(batcher.ask(np.full((2, 2, 3), 7, np.uint8), 1))
    await asyncio.sleep(0.02)
    rest = [batcher.ask(np.full((2, 2, 3), value, np.uint8), value) for value in range(6)]
    assert await asyncio.gather(first, *rest) == [71, *(11 * value for value in range(6))]
    await batcher.stop()
    assert sizes == [1, 4, 2]


async def test_an_error_reaches_those_who_asked_and_nobody_else():
    def compute(pixels: np.ndarray, top_k: Any) -> list[int]:
        if pixels.any():
            raise DualPromptError("no")
        return [0] * len(pixels)

    batcher = Batcher(compute)
    batcher.start()
    with pytest.raises(DualPromptError):
        await batcher.ask(np.ones((1, 1, 3), np.uint8), 1)
    assert await batcher.ask(np.zeros((1, 1, 3), np.uint8), 1) == 0
    await batcher.stop()


async def test_teach_then_answer_then_forget(world: World, model: Path):
    before = ContinualLearner.load(model, "cpu").predict(pictures(world, "ash", "test"))
    async with serving(model) as client:
        first = (await client.get("/model")).json()
        reply = await client.post("/tasks", files=lesson(world, "elm", "fir"), data={"name": "third", "epochs": "2"})
        assert reply.status_code == 202
        assert reply.headers["location"] == reply.json()["url"] == f"/jobs/{reply.json()['id']}"
        job = await finished(client, reply.json()["id"])
        assert (job["state"], job["progress"], job["error"]) == ("done", 1.0, None)
        assert (job["classes"], job["images"]) == (["elm", "fir"], 13)
        assert client.service.jobs._process.returncode == 0
        assert uploads(model) == []
        taught = (await client.get("/model")).json()
        assert taught["model_version"] != first["model_version"]
        assert [task["name"] for task in taught["tasks"]] == ["first", "second", "third"]
        assert set(taught["classes"]) == {"ash", "birch", "cedar", "elm", "fir"}
        learned = ContinualLearner.load(model, "cpu")
        asked = pictures(world, "elm", "test")
        replies = (await client.post("/predict", files=files(*asked))).json()["answers"]
        for found, answer in zip(replies, learned.predict(asked), strict=True):
            assert found["label"] == answer.label
            assert {"elm", "fir"} <= {score["label"] for score in found["top"]}
        again = await client.post("/tasks", files=lesson(world, "elm"))
        assert "knows 'elm' already" in error_of(again, 409)
        assert uploads(model) == []

        assert (await client.delete(f"/tasks/{job['task']}")).json()["forgot"] == "third"
        assert error_of(await client.delete(f"/tasks/{job['task']}"), 404)
        assert (await client.delete("/classes/cedar")).status_code == 200
        assert error_of(await client.delete("/classes/cedar"), 404)
        known = (await client.get("/model")).json()
        assert (known["classes"], known["tasks"][0]["name"]) == (["ash", "birch"], "first")
        found = (await client.post("/predict", files=files(*pictures(world, "ash", "test")))).json()["answers"]
        assert all(score["label"] in ("ash", "birch") for answer in found for score in answer["top"])
    assert ContinualLearner.load(model, "cpu").classes == ("ash", "birch")
    assert len(found) == len(before)


async def test_a_class_may_be_called_anything_printable(world: World, model: Path):
    name = "A/B & c#?%2F 'x'"
    learner = ContinualLearner.load(model, "cpu")
    learner.learn({name: pictures(world, "elm")}, epochs=1)
    learner.save(model)
    async with serving(model) as client:
        known = (await client.get("/model")).json()
        assert name in known["classes"]
        assert known["accuracy_matrix"] == learner.accuracy_matrix()
        assert (await client.delete(f"/classes/{quote(name, safe='')}")).json()["forgot"] == name
        assert name not in (await client.get("/model")).json()["classes"]


async def test_a_zip_teaches_too_whether_or_not_its_folder_is_in_it(world: World, model: Path):
    entries = {
        f"trees/{name}/{path.name}": path.read_bytes() for name in ("elm", "fir") for path in pictures(world, name)
    }
    entries |= {
        "trees/notes.txt": b"hello",
        "trees/inner.zip": archive({"x/y.png": png()}),
        "__MACOSX/trees/elm/._0.png": b"x",
    }
    async with serving(model) as client:
        whole = zip64(archive(entries))
        reply = await client.post("/tasks", files={"archive": ("a.zip", whole)}, data={"epochs": "1"})
        job = await finished(client, reply.json()["id"])
        assert (job["state"], job["classes"], job["images"]) == ("done", ["elm", "fir"], 13)
    assert uploads(model) == []


def test_the_class_is_the_first_folder_that_tells_pictures_apart():
    assert split_names(["a/1.png", "b/x/2.png"]) == {"a/1.png": "a", "b/x/2.png": "b"}
    assert split_names(["t/a/1.png", "t/b/2.png"]) == {"t/a/1.png": "a", "t/b/2.png": "b"}
    assert split_names(["a/1.png", "a/2.png"]) == {"a/1.png": "a", "a/2.png": "a"}
    for name in ("/etc/a.png", "../a/b.png", "a/../../b.png", "C:/a/b.png", "a\\b.png", "loose.png", "", "a\0/b.png"):
        with pytest.raises(Refusal) as refused:
            split_names([name])
        assert refused.value.status == 422


async def test_answers_go_on_with_the_old_model_while_it_learns(world: World, model: Path):
    asked = files(pictures(world, "ash", "test")[0])
    async with serving(model) as client:
        version = (await client.get("/model")).json()["model_version"]
        job = (await client.post("/tasks", files=lesson(world, "elm"), data={"epochs": "4"})).json()["id"]
        await until_running(client, job)
        versions = []
        while (await client.get(f"/jobs/{job}")).json()["state"] == "running":
            reply = await client.post("/predict", files=asked)
            assert reply.status_code == 200
            versions.append(reply.json()["answers"][0]["version"])
            assert error_of(await client.delete("/classes/ash"), 409) if len(versions) == 1 else True
        assert (await finished(client, job))["state"] == "done"
        reply = await client.post("/predict", files=asked)
        versions.append(reply.json()["answers"][0]["version"])
    assert len(versions) > 2
    assert versions[0] == version != versions[-1]
    assert len(set(versions)) == 2  # one switch, and never back
    assert versions == sorted(versions, key=[version, versions[-1]].index)


async def test_a_killed_learning_process_fails_its_job_and_nothing_else(world: World, model: Path):
    before = sandbox.contents(model)
    async with serving(model) as client:
        job = (await client.post("/tasks", files=lesson(world, "elm"), data={"epochs": "400"})).json()["id"]
        os.kill(await until_running(client, job), signal.SIGKILL)
        found = await finished(client, job)
        assert found["state"] == "failed"
        assert "signal 9" in found["error"]
        assert uploads(model) == []
        assert (await client.post("/predict", files=files(pictures(world, "ash", "test")[0]))).status_code == 200
        after = {
            name: value for name, value in sandbox.contents(model).items() if not name.startswith((".serve", ".lock"))
        }
        assert after == before
        job = (await client.post("/tasks", files=lesson(world, "elm"), data={"epochs": "1"})).json()["id"]
        assert (await finished(client, job))["state"] == "done"


async def test_jobs_can_be_given_up_and_wait_their_turn(world: World, model: Path):
    async with serving(model, limits=Limits(queued_jobs=2)) as client:
        first = (await client.post("/tasks", files=lesson(world, "elm"), data={"epochs": "400"})).json()["id"]
        second = (await client.post("/tasks", files=lesson(world, "fir"))).json()["id"]
        full = await client.post("/tasks", files=lesson(world, "hazel"))
        assert "wait" in error_of(full, 429)
        assert int(full.headers["retry-after"]) > 0
        await until_running(client, first)
        assert (await client.get(f"/jobs/{second}")).json()["state"] == "queued"
        assert (await client.delete(f"/jobs/{second}")).json()["error"] == "cancelled"
        assert (await client.delete(f"/jobs/{first}")).status_code == 200
        assert (await finished(client, first))["error"] == "cancelled"
        assert error_of(await client.delete(f"/jobs/{first}"), 409)
        assert error_of(await client.get("/jobs/99"), 404)
        assert [job["state"] for job in (await client.get("/jobs")).json()] == ["failed", "failed"]
    assert uploads(model) == []


async def test_a_job_given_up_before_its_process_exists_is_given_up(world: World, model: Path):
    async with serving(model) as client:
        jobs = client.service.jobs
        number = (await client.post("/tasks", files=lesson(world, "elm"), data={"epochs": "400"})).json()["id"]
        while jobs.jobs[number].state == "queued":
            await asyncio.sleep(0)
        assert jobs._process is None
        jobs.cancel(jobs.jobs[number])
        assert (await finished(client, number))["error"] == "cancelled"
    assert uploads(model) == []


async def test_no_job_ends_the_worker(world: World, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    strange = tmp_path / "python"
    strange.write_text("#!/bin/sh\nhead -c 100000 /dev/zero\n")  # a line longer than asyncio reads
    strange.chmod(0o755)
    async with serving(model) as client:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(strange))
            first = (await client.post("/tasks", files=lesson(world, "elm"))).json()["id"]
            job = await finished(client, first, 10)
        assert job["state"] == "failed"
        assert "log" in job["error"]
        assert uploads(model) == []
        assert (await client.delete("/classes/cedar")).status_code == 200
        second = (await client.post("/tasks", files=lesson(world, "elm"), data={"epochs": "1"})).json()["id"]
        assert (await finished(client, second))["state"] == "done"


def test_what_the_learning_process_tells_fits_a_line():
    channel = io.StringIO()
    Reporter(channel).tell(error="\N{GRINNING FACE}" * 100_000, progress=0.5)
    assert len(channel.getvalue()) < 2**16
    assert json.loads(channel.getvalue())["progress"] == 0.5


async def test_a_job_that_cannot_be_put_on_record_is_not_learned(world: World, model: Path):
    async with serving(model) as client:
        record = client.service.jobs.file
        record.unlink()
        record.mkdir()  # so that it cannot be replaced
        assert "cannot be written" in error_of(await client.post("/tasks", files=lesson(world, "elm")), 507)
        assert (await client.get("/jobs")).json() == []
        assert uploads(model) == []


async def test_a_task_that_waits_keeps_its_name(world: World, model: Path):
    async with serving(model) as client:
        data = {"name": "autumn", "epochs": "400"}
        first = (await client.post("/tasks", files=lesson(world, "elm"), data=data)).json()["id"]
        for _ in ("queued", "running"):
            reply = await client.post("/tasks", files=lesson(world, "fir"), data=data)
            assert "is called 'autumn' already" in error_of(reply, 409)
            await until_running(client, first)
        await client.delete(f"/jobs/{first}")
        await finished(client, first)
        second = (await client.post("/tasks", files=lesson(world, "fir"), data=data)).json()["id"]
        await client.delete(f"/jobs/{second}")


async def test_what_was_forgotten_is_named_nowhere(model: Path):
    served = ContinualLearner.load(model, "cpu")
    first, second = served.tasks
    jobs = [
        Job(1, "first", ["ash", "birch"], 9, "done", task=first.id),
        Job(2, None, ["cedar"], 9, "done", task=second.id),
        Job(3, None, ["cedar", "elm"], 9, "failed", error="'cedar/1.png' cannot be read"),
        Job(4, "first", ["fir"], 9, "failed", error="cancelled"),
        Job(5, None, ["hazel"], 9, "failed", error="cancelled"),
        Job(6, None, ["oak"], 9, "done", task=99),  # forgotten by a command
        Job(7, None, ["oak"], 9, "failed", error="cancelled"),
    ]
    record = model / ".serve" / "jobs.json"
    record.parent.mkdir()
    record.write_text(json.dumps({"next": 8, "jobs": [asdict(job) for job in jobs]}))

    async with serving(model) as client:

        async def told() -> list[int]:
            found = [job["id"] for job in (await client.get("/jobs")).json()]
            assert found == [job["id"] for job in json.loads(record.read_text())["jobs"]]
            return found

        assert await told() == [1, 2, 3, 4, 5]
        await client.delete("/classes/cedar")
        assert await told() == [1, 4, 5]
        assert "cedar" not in record.read_text()
        await client.delete(f"/tasks/{first.id}")
        assert await told() == [5]
    for path in model.rglob("*"):
        assert not path.is_file() or not {b"ash", b"birch", b"cedar"} & set(path.read_bytes().split(b'"')), path


async def test_forgetting_that_fails_late_leaves_what_is_saved_answering(model: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    async with serving(model) as client:
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "copymode", full)  # right after the new model took the old one's place
            assert error_of(await client.delete("/classes/cedar"), 507)
        assert ContinualLearner.load(model, "cpu").classes == ("ash", "birch")
        assert (await client.get("/model")).json()["classes"] == ["ash", "birch"]


async def test_a_class_may_be_called_like_a_task(world: World, model: Path):
    learner = ContinualLearner.load(model, "cpu")
    learner.learn({"first": pictures(world, "elm"), "second": pictures(world, "fir")}, "third", epochs=1)
    learner.save(model)
    async with serving(model) as client:
        assert (await client.delete("/classes/first")).json()["forgot"] == "first"
        known = (await client.get("/model")).json()
        assert [task["name"] for task in known["tasks"]] == ["first", "second", "third"]
        assert known["classes"] == ["ash", "birch", "cedar", "second"]
        assert (await client.delete(f"/tasks/{known['tasks'][1]['id']}")).json()["forgot"] == "second"
        assert (await client.get("/model")).json()["classes"] == ["ash", "birch", "second"]


async def test_a_damaged_picture_fails_its_job_by_its_own_name(world: World, model: Path):
    whole = pictures(world, "elm")[0].read_bytes()
    half = whole[: len(whole) // 2]
    parts = [*lesson(world, "fir"), ("images", ("fir/broken one.png", half))]
    parts += [("images", (f"fir/{n}{'x' * 200}.png", half)) for n in range(9)]
    async with serving(model) as client:
        reply = await client.post("/tasks", files=parts)
        job = await finished(client, reply.json()["id"])
    assert job["state"] == "failed"
    assert "fir/broken one.png" in job["error"]
    assert str(model) not in job["error"]
    assert 20 * "x" in job["error"]
    assert 100 * "x" not in job["error"]
    assert len(job["error"]) < 1000
    assert uploads(model) == []


LIMITS = Limits(
    predict_bytes=40_000,
    teach_bytes=60_000,
    image_bytes=30_000,
    image_pixels=10_000,
    predict_images=3,
    task_images=4,
    task_classes=2,
    archive_entries=6,
    archive_bytes=3_000_000,
    archive_ratio=20,
    epochs=9,
)
SMALL = png()


@pytest.mark.parametrize(
    ("status", "said", "parts"),
    [
        (413, "40000", [("images", ("a.png", bytes(20_000)))] * 3),
        (413, "30000", [("images", ("a.png", bytes(31_000)))]),
        (413, "at most 3", [("images", ("a.png", SMALL))] * 4),
        (413, "pixels", [("images", ("a.png", png(101, 100)))]),
        (413, "pixels", [("images", ("bomb.png", png(14_000, 14_000, "1")))]),
        (422, "not an image", [("images", ("a.png", b"hello"))]),
        (422, "not an image", [("images", ("a.png", b""))]),
        (422, "not an image", [("images", ("a.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"))]),
        (422, "not an image", [("images", ("a.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>"))]),
        (422, "damaged", [("images", ("a.png", SMALL[:50]))]),
        (422, "unknown field", [("picture", ("a.png", SMALL))]),
        (422, "unknown field", [("images", (None, SMALL))]),
        (422, "broken.png", [("images", ("fine.png", SMALL)), ("images", ("broken.png", b"GIF89a"))]),
    ],
)
async def test_predict_refuses(model: Path, status: int, said: str, parts: Any):
    async with serving(model, limits=LIMITS) as client:
        assert said in error_of(await client.post("/predict", files=parts), status)
        assert (await client.post("/predict", files={"images": SMALL})).status_code == 200
        assert client.service._held == 0


def named(*names: str) -> list[tuple[str, tuple[str, bytes]]]:
    return [("images", (name, SMALL)) for name in names]


def tampered(**changes: Any) -> bytes:
    """An archive of one picture whose table of contents was changed."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as opened:
        info = zipfile.ZipInfo("a/1.png")
        opened.writestr(info, SMALL * 10, zipfile.ZIP_DEFLATED)
        for name, value in changes.items():
            setattr(info, name, value)
    return file.getvalue()


def overlong() -> bytes:
    """An archive that says it has 60,000 entries."""
    content = bytearray(archive({"a/1.png": SMALL}))
    content[-12:-8] = struct.pack("<HH", 60_000, 60_000)[:4]
    return bytes(content[:-14]) + struct.pack("<HH", 60_000, 60_000) + bytes(content[-10:])


def modest() -> bytes:
    """An archive of 7 entries that says it has one."""
    content = archive({f"a/{n}.txt": b"" for n in range(7)})
    return content[:-14] + struct.pack("<HH", 1, 1) + content[-10:]


def zip64(content: bytes, entries: int | None = None, record: bytes = b"PK\x06\x06") -> bytes:
    """An archive whose table of contents is told of as in archives of more than 4 GB, as some programs always do."""
    count, size, start = struct.unpack("<HII", content[-12:-2])
    told = struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, entries or count, size, start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, len(content) - 22, 1)
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return content[:-22] + record + told + locator + end


@pytest.mark.parametrize(
    ("status", "said", "parts", "fields"),
    [
        (413, "60000", [("images", ("a/1.png", bytes(25_000)))] * 3, {}),
        (413, "30000", [("images", ("a/1.png", bytes(31_000)))], {}),
        (413, "at most 4", named(*(f"a/{n}.png" for n in range(5))), {}),
        (413, "classes", named("a/1.png", "b/1.png", "c/1.png"), {}),
        (413, "pixels", [("images", ("a/1.png", png(101, 100)))], {}),
        (422, "not an image", [("images", ("a/1.png", b"hello"))], {}),
        (422, "class folder", named("1.png"), {}),
        (422, "relative path", named("../a/1.png"), {}),
        (422, "relative path", named("/a/1.png"), {}),
        (422, "name of a class", named("a\u200b/1.png"), {}),
        (422, "name of a class", named(f"{'a' * 101}/1.png"), {}),
        (422, "too long", named(f"a/{'b' * 256}.png"), {}),
        (422, "no images", [], {"name": "x"}),
        (422, "epochs", named("a/1.png"), {"epochs": "10"}),
        (422, "epochs", named("a/1.png"), {"epochs": "-1"}),
        (422, "epochs", named("a/1.png"), {"epochs": "٣"}),
        (422, "again", named("a/1.png"), {"again": "maybe"}),
        (422, "unknown field", named("a/1.png"), {"seed": "1"}),
        (413, "longer", named("a/1.png"), {"name": "x" * 20_000}),
        (422, "name of a class or task", named("a/1.png"), {"name": "a\nb"}),
        (409, "knows 'ash' already", named("ash/1.png"), {}),
        (409, "is called 'first' already", named("a/1.png"), {"name": "first"}),
        (422, "not both", [*named("a/1.png"), ("archive", ("a.zip", archive({"a/1.png": SMALL})))], {}),
        (422, "one archive", [("archive", ("a.zip", archive({"a/1.png": SMALL})))] * 2, {}),
        (422, "no zip", [("archive", ("a.zip", b"hello"))], {}),
        (422, "no zip", [("archive", ("a.zip", b""))], {}),
        (422, "damaged", [("archive", ("a.zip", archive({"a/1.png": SMALL})[20:]))], {}),
        (422, "no images", [("archive", ("a.zip", archive({"a/1.txt": b"x"})))], {}),
        (422, "relative path", [("archive", ("a.zip", archive({"../a/1.png": SMALL})))], {}),
        (422, "relative path", [("archive", ("a.zip", archive({"/etc/1.png": SMALL})))], {}),
        (422, "relative path", [("archive", ("a.zip", archive({"a/b\\1.png": SMALL})))], {}),
        (422, "relative path", [("archive", ("a.zip", archive({"C:/a/1.png": SMALL})))], {}),
        (413, "6 entries", [("archive", ("a.zip", archive({f"a/{n}.txt": b"" for n in range(7)})))], {}),
        (413, "at most 4", [("archive", ("a.zip", archive({f"a/{n}.png": SMALL for n in range(5)})))], {}),
        (413, "6 entries", [("archive", ("a.zip", overlong()))], {}),
        (413, "7 entries", [("archive", ("a.zip", modest()))], {}),
        (413, "6 entries", [("archive", ("a.zip", zip64(archive({"a/1.png": SMALL}), 2**40)))], {}),
        (422, "ZIP64", [("archive", ("a.zip", zip64(archive({"a/1.png": SMALL}), record=b"PK\0\0")))], {}),
        (422, "too long", [("archive", ("a.zip", archive({f"a/{'b' * 9_000}.png": SMALL})))], {}),
        (422, "too long", [("archive", ("a.zip", archive({f"a/{'b/' * 600}c.png": SMALL})))], {}),
        (422, "claim more", [("archive", ("a.zip", tampered(compress_size=2**31)))], {}),
        (413, "fold", [("archive", ("a.zip", archive({"a/1.txt": bytes(2_000_000)})))], {}),
        (413, "3000000", [("archive", ("a.zip", archive({f"a/{n}.txt": bytes(1_000_000) for n in range(4)})))], {}),
        (413, "30000", [("archive", ("a.zip", archive({"a/1.png": bytes(40_000)})))], {}),
        (422, "link", [("archive", ("a.zip", tampered(external_attr=(stat.S_IFLNK | 0o777) << 16)))], {}),
        (422, "link", [("archive", ("a.zip", tampered(external_attr=stat.S_IFIFO << 16)))], {}),
        (422, "encrypted", [("archive", ("a.zip", tampered(flag_bits=1)))], {}),
        (422, "deflate", [("archive", ("a.zip", tampered(compress_type=zipfile.ZIP_BZIP2)))], {}),
        (422, "damaged", [("archive", ("a.zip", tampered(compress_type=zipfile.ZIP_STORED)))], {}),
        (422, "damaged", [("archive", ("a.zip", tampered(CRC=1)))], {}),
        (422, "version", [("archive", ("a.zip", tampered(extract_version=99)))], {}),
        (422, "", [("archive", ("a.zip", tampered(file_size=10)))], {}),
        (422, "", [("archive", ("a.zip", tampered(header_offset=999_999)))], {}),
    ],
)
async def test_teach_refuses_and_leaves_nothing(
    model: Path, status: int, said: str, parts: Any, fields: dict[str, str]
):
    outside = sandbox.contents(model.parent)
    async with serving(model, limits=LIMITS) as client:
        body = {"files": parts or {"x": (None, "")}, "data": fields}
        if not parts:
            body = {"files": {name: (None, value) for name, value in fields.items()}}
        assert said in error_of(await client.post("/tasks", **body), status)
        assert uploads(model) == []
        assert list((model / ".serve" / "jobs").glob("*")) == []
        assert (await client.get("/jobs")).json() == []
    inside = {"model/.lock", "model/.serve/jobs.json"}
    assert {name for name, _ in sandbox.contents(model.parent).items() ^ outside.items()} <= inside


async def test_malformed_requests_are_refused(model: Path):
    async with serving(model, limits=LIMITS) as client:
        assert error_of(await client.post("/predict", json={}), 415)
        assert error_of(await client.post("/predict"), 415)
        kind = {"content-type": "multipart/form-data; boundary=xx"}
        whole = b'--xx\r\ncontent-disposition: form-data; name="images"; filename="a"\r\n\r\nabc\r\n--xx--\r\n'
        for length in range(len(whole) - 4):
            assert (await client.post("/predict", content=whole[:length], headers=kind)).status_code in (400, 422), (
                length
            )
        assert error_of(await client.post("/predict", content=b"garbage", headers=kind), 400)
        assert error_of(await client.post("/predict?top_k=0", files={"images": SMALL}), 422)
        assert error_of(await client.post("/predict?top_k=x", files={"images": SMALL}), 422)
        assert error_of(await client.get("/nothing"), 404)
        assert error_of(await client.get("/predict"), 405)
        assert error_of(await client.get("/static/../app.py"), 404)
        assert error_of(await client.get("/static/%2e%2e/app.py"), 404)
        assert error_of(await client.delete("/tasks/first"), 422)
        assert error_of(await client.get("/jobs/99999999999999999999"), 404)


async def test_slow_and_crowding_clients_are_refused(model: Path):
    async def slowly() -> AsyncIterator[bytes]:
        yield b"--xx\r\n"
        await asyncio.sleep(5)

    kind = {"content-type": "multipart/form-data; boundary=xx"}
    async with serving(model, limits=Limits(body_seconds=0.1)) as client:
        assert error_of(await client.post("/predict", content=slowly(), headers=kind), 408)
    async with serving(model, limits=Limits(memory_bytes=100)) as client:
        reply = await client.post("/predict", files={"images": SMALL * 9})
        assert "memory" in error_of(reply, 429)
        assert client.service._held == 0
    async with serving(model, limits=Limits(queued_images=1)) as client:
        reply = await client.post("/predict", files=[("images", ("a.png", SMALL))] * 2)
        assert "to answer" in error_of(reply, 429)
        assert int(reply.headers["retry-after"]) > 0
        assert (await client.post("/predict", files={"images": SMALL})).status_code == 200


async def test_token_host_and_origin(model: Path):
    async with serving(model, rules=Rules(TOKEN, closed=True)) as client:
        del client.headers["authorization"]
        for method, path in (
            ("GET", "/model"),
            ("POST", "/predict"),
            ("POST", "/tasks"),
            ("DELETE", "/tasks/1"),
            ("GET", "/jobs"),
        ):
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": TOKEN},
                {"authorization": "Bearer ü".encode()},
            ):
                reply = await client.request(method, path, headers=headers)
                assert "token" in error_of(reply, 401)
                assert reply.headers["www-authenticate"] == "Bearer"
        reply = await client.get("/model", headers=SHOWN)
        assert reply.json()["token_required"] is True
        assert (await client.post("/predict", files={"images": SMALL}, headers=SHOWN)).status_code == 200
        for path in ("/", "/healthz", "/docs", "/openapi.json", "/static/app.js"):
            assert (await client.get(path)).status_code == 200, path
    async with serving(model) as client:
        del client.headers["authorization"]
        for method, path in (
            ("POST", "/tasks"),
            ("DELETE", "/tasks/1"),
            ("DELETE", "/classes/ash"),
            ("DELETE", "/jobs/1"),
        ):
            for headers in ({}, {"authorization": "Bearer wrong"}):
                assert "token" in error_of(await client.request(method, path, headers=headers), 401)
        assert (await client.get("/model")).json()["token_required"] is False
        assert (await client.get("/model")).json()["classes"] == ["ash", "birch", "cedar"]
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "[::1", "192.168.0.1"):
            assert error_of(await client.get("/model", headers={"host": host}), 421)
        for host in ("localhost:8000", "[::1]:80", "127.0.0.1"):
            assert (await client.get("/model", headers={"host": host})).status_code == 200
        for headers in (
            {"origin": "https://evil.example"},
            {"origin": "null"},
            {"sec-fetch-site": "cross-site"},
            {"origin": "//["},
        ):
            assert (await client.post("/predict", files={"images": SMALL}, headers=headers)).status_code in (400, 403)
        reply = await client.post("/predict", files={"images": SMALL}, headers={"origin": HERE})
        assert reply.status_code == 200
        assert not [name for name in reply.headers if name.startswith("access-control")]
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'self'" in reply.headers["content-security-policy"]


def test_other_addresses_need_a_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DUALPROMPT_TOKEN", raising=False)
    for host in ("127.0.0.1", "::1", "localhost"):
        made = rules_for(host, None)
        assert made == Rules(made.token)
        assert len(made.token) > 20
        assert made.token != rules_for(host, None).token
        assert rules_for(host, TOKEN) == Rules(TOKEN, closed=True)
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.org"):
        with pytest.raises(DualPromptError, match="token"):
            rules_for(host, None)
        assert rules_for(host, TOKEN) == Rules(TOKEN, local=False, closed=True)
    with pytest.raises(DualPromptError, match="at least 16"):
        rules_for("0.0.0.0", "short")
    for token in ("ein längliches Geheimnis", " a token with space around ", "a token\nof two lines"):
        with pytest.raises(DualPromptError, match="printable ASCII"):
            rules_for("127.0.0.1", token)
    monkeypatch.setenv("DUALPROMPT_TOKEN", TOKEN)
    assert rules_for("0.0.0.0", None) == Rules(TOKEN, local=False, closed=True)


async def test_pages_load_nothing_from_elsewhere(model: Path):
    async with serving(model) as client:
        for path in ("/", "/docs", "/static/app.js", "/static/style.css"):
            text = (await client.get(path)).text.replace("http://www.w3.org/", "")
            assert "http://" not in text, path
            assert "https://" not in text, path
        schema = (await client.get("/openapi.json")).json()
        assert {"/predict", "/model", "/tasks", "/jobs/{job}", "/tasks/{task}", "/healthz", "/metrics"} <= set(
            schema["paths"]
        )
        assert (await client.get("/healthz")).json()["status"] == "ok"


@pytest.mark.parametrize("closed", [False, True])
async def test_the_schema_tells_what_needs_the_token(model: Path, closed: bool):
    async with serving(model, rules=Rules(TOKEN, closed=closed)) as client:
        del client.headers["authorization"]
        schema = (await client.get("/openapi.json")).json()
        (name,), (scheme,) = zip(*schema["components"]["securitySchemes"].items(), strict=True)
        assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
        for path, methods in schema["paths"].items():
            for method, about in methods.items():
                reply = await client.request(method, path.replace("{job}", "1").replace("{task}", "1"))
                assert about.get("security") == ([{name: []}] if reply.status_code == 401 else None), (method, path)


async def test_metrics_name_routes_and_never_what_clients_make_up(world: World, model: Path):
    async with serving(model) as client:
        await client.post("/predict", files=files(pictures(world, "ash", "test")[0]))
        for path in ("/jobs/7", "/jobs/8", "/secret", "/other"):
            await client.get(path)
        text = (await client.get("/metrics")).text
    assert 'dualprompt_requests_total{method="POST",route="/predict",status="200"} 1.0' in text
    assert 'dualprompt_requests_total{method="GET",route="/jobs/{job}",status="404"} 2.0' in text
    assert 'dualprompt_requests_total{method="GET",route="other",status="404"} 2.0' in text
    assert 'dualprompt_request_seconds_count{route="/predict"} 1.0' in text
    assert 'dualprompt_model_info{version="' in text
    assert 'dualprompt_jobs{state="running"} 0.0' in text
    assert "dualprompt_queue_images 0.0" in text


async def test_full_disk_during_an_upload_is_said_and_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    async with serving(model) as client:
        with monkeypatch.context() as patch:
            patch.setattr("dualprompt.serve.uploads._Assembler._data", full)
            reply = await client.post("/tasks", files=named("a/1.png"))
        assert "disk is full" in error_of(reply, 507)
        assert uploads(model) == []
        assert (await client.post("/predict", files={"images": SMALL})).status_code == 200


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_a_batch_that_cores_share_is_answered_in_order(world: World, model: Path, cores: int):
    served = ServedModel(model, "cpu")
    served._cores = cores
    paths = [path for name in ("ash", "birch", "cedar") for path in pictures(world, name, "test")][:7]
    pixels = np.stack([served.learner.pixels(path) for path in paths])
    top_k = [1 + n % 3 for n in range(7)]
    alone = [served.learner.predict_pixels(image[None], k)[0] for image, k in zip(pixels, top_k, strict=True)]
    threads = torch.get_num_threads()
    try:
        for size in range(1, 8):
            found = served.answers(pixels[:size], top_k[:size])
            for (answer, version), expected in zip(found, alone[:size], strict=True):
                assert version == served.version
                assert [score.label for score in answer.top] == [score.label for score in expected.top]
                assert answer.probability == pytest.approx(expected.probability, abs=1e-5)
    finally:
        torch.set_num_threads(threads)
        served.close()


async def test_only_one_server_for_a_model(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dualprompt.serve.model.LOCK_SECONDS", 0.1)
    first = ServedModel(model, "cpu")
    with pytest.raises(DualPromptError, match="is being served"):
        ServedModel(model, "cpu")
    told = sandbox.call("serve", model, "--port", "0").err.splitlines()
    assert "waiting up to" in told[0]
    assert "is being served" in told[-1]
    first.close()
    said: list[str] = []
    ServedModel(model, "cpu", said.append).close()
    assert said == []


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
            job = jobs.add(folder, found, "third", epochs, False)
        job.state, job.attempts = "running", 1
        jobs._save()
        served.close()
        return folder, job.id

    return asyncio.run(prepare())


async def _nothing() -> None:
    pass


def _teach(model: str, job: str, log: str, at: int) -> None:
    """Learn a job; SIGKILL hits right before the `at`-th change to the model's files."""
    import torch

    from dualprompt.serve.teach import Reporter, teach

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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(sandbox.PRELOADED)
    process = context.Process(target=_teach, args=(str(model), str(job), str(log), at))
    process.start()
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


def test_the_command_refuses_clearly(model: Path, tmp_path: Path):
    assert "token" in sandbox.call("serve", model, "--host", "0.0.0.0").error
    assert "--port" in sandbox.call("serve", model, "--port", "70000").error
    assert "nothing" in sandbox.call("serve", tmp_path / "nothing", "--port", "0").error


def test_limits_are_all_used():
    source = "".join(path.read_text() for path in (Path(__file__).parents[1] / "src/dualprompt/serve").glob("*.py"))
    assert [name for name in vars(Limits()) if f"limits.{name}" not in source] == []
