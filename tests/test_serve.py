"""The HTTP server: answers, batches, learns beside serving, and forgets."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch

import sandbox
from sandbox import World, pictures
from serving import TOKEN, archive, error_of, files, finished, lesson, png, serving, until_running, uploads, zip64

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from dualprompt.errors import DualPromptError  # noqa: E402
from dualprompt.hosted.jobs import Job  # noqa: E402
from dualprompt.hosted.model import ServedModel  # noqa: E402
from dualprompt.hosted.teach import Reporter  # noqa: E402
from dualprompt.inbound.guard import Rules  # noqa: E402
from dualprompt.inbound.limits import Limits, Refusal  # noqa: E402
from dualprompt.inbound.pictures import split_names  # noqa: E402
from dualprompt.learner import ContinualLearner  # noqa: E402
from dualprompt.serve.batching import Batcher  # noqa: E402

pytestmark = pytest.mark.anyio


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


@pytest.mark.usefixtures("quick_python")
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
        assert known["accuracy_matrix"] is None  # it is told when it is complete
        assert (await client.delete(f"/classes/{quote(name, safe='')}")).json()["forgot"] == name
        assert name not in (await client.get("/model")).json()["classes"]


@pytest.mark.usefixtures("quick_python")
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


@pytest.mark.usefixtures("quick_python")
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
            await asyncio.sleep(0.02)  # or asking takes all that learning needs
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


@pytest.mark.usefixtures("quick_python")
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
        await client.delete("/classes/cedar?purge=true")
        assert await told() == [1, 4, 5]
        assert "cedar" not in record.read_text()
        await client.delete(f"/tasks/{first.id}?purge=true")
        assert await told() == [5]
    for path in model.rglob("*"):
        assert not path.is_file() or not {b"ash", b"birch", b"cedar"} & set(path.read_bytes().split(b'"')), path


async def test_what_fails_after_the_switch_does_not_fail_forgetting(model: Path):
    (model / "README.md").unlink()
    (model / "README.md").mkdir()  # the card cannot be written, right after the new model took its place
    async with serving(model) as client:
        assert (await client.delete("/classes/cedar")).json()["forgot"] == "cedar"
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


@pytest.mark.usefixtures("quick_python")
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
                reply = await client.request(
                    method, path.replace("{job}", "1").replace("{task}", "1").replace("{item}", "1")
                )
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
            for (answer, version, _), expected in zip(found, alone[:size], strict=True):
                assert version == served.version
                assert [score.label for score in answer.top] == [score.label for score in expected.top]
                assert answer.probability == pytest.approx(expected.probability, abs=1e-5)
    finally:
        torch.set_num_threads(threads)
        served.close()


async def test_only_one_server_for_a_model(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dualprompt.hosted.model.LOCK_SECONDS", 0.1)
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


def test_the_command_refuses_clearly(model: Path, tmp_path: Path):
    assert "token" in sandbox.call("serve", model, "--host", "0.0.0.0").error
    assert "--port" in sandbox.call("serve", model, "--port", "70000").error
    assert "is a file" in sandbox.call("serve", Path(__file__), "--port", "0").error
