"""A server that starts from nothing, bodies that are images, other engines, and the client of the package."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

import sandbox
from dualprompt import ContinualLearner
from dualprompt.client import Client, RefusedError
from dualprompt.errors import DualPromptError
from sandbox import World, pictures
from serving import SMALL, TOKEN, error_of, files, finished, lesson, listening, serving

from dualprompt.inbound.limits import Limits  # isort: skip
from dualprompt.hosted.engine import Engine  # isort: skip
from dualprompt.hosted.model import ServedModel, describe  # isort: skip
from dualprompt.serve.run import Options, Told, make_new  # isort: skip


pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("quick_python")]


def empty(world: World, path: Path) -> Path:
    learner = ContinualLearner(str(world.weights), "lda", device="cpu")
    return learner.save(path)


class Heard(Told):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def remark(self, text: str) -> None:
        self.lines.append(text)


def test_a_new_model_is_made_as_it_is_asked_for(world: World, tmp_path: Path):
    told, path = Heard(), tmp_path / "new"
    options = Options(device="cpu", new={"backbone": str(world.weights), "method": "lda"})
    make_new(path, options, told)
    learner = ContinualLearner.load(path, "cpu")
    assert (learner.classes, learner.info()["method"]["name"]) == ((), "lda")
    assert "knows nothing yet" in told.lines[0]
    make_new(path, Options(device="cpu"), told)  # it is there, and is served as it is
    assert len(told.lines) == 1
    with pytest.raises(DualPromptError, match="--backbone is for a new model"):
        make_new(path, options, told)


def test_nothing_is_made_where_something_else_lies(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "holds no model, but 'notes.txt'" in sandbox.call("serve", tmp_path, "--port", "0").error
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert "go with --engine onnx" in sandbox.call("serve", tmp_path / "new", "--int8").error
    assert not (tmp_path / "new").exists()


async def test_an_empty_model_says_so_is_taught_and_answers(world: World, tmp_path: Path):
    async with serving(empty(world, tmp_path / "new")) as client:
        said = error_of(await client.post("/predict", files=files(*pictures(world, "ash", "test"))), 409)
        assert said == "the model knows no class yet; teach it first"
        assert (await client.get("/model")).json()["classes"] == []
        job = (await client.post("/tasks", files=lesson(world, "ash", "birch"))).json()["id"]
        assert (await finished(client, job))["error"] is None
        reply = await client.post("/predict", files=files(*pictures(world, "ash", "test")))
        assert {answer["label"] for answer in reply.json()["answers"]} <= {"ash", "birch"}


async def test_the_body_may_be_one_image(world: World, model: Path):
    picture = pictures(world, "ash", "test")[0]
    async with serving(model, limits=Limits(image_bytes=10_000)) as client:
        form = (await client.post("/predict", files=files(picture))).json()["answers"][0]
        sent = {"content": picture.read_bytes(), "headers": {"content-type": "image/png"}}
        body = (await client.post("/predict", **sent)).json()["answers"]
        assert [body[0] | {"path": picture.name}] == [form]
        assert body[0]["path"] is None
        for content, kind, status in (
            (b"", "image/png", 422),
            (b"no picture", "image/jpeg", 422),
            (bytes(10_001), "image/png", 413),
            (SMALL, "text/plain", 415),
            (SMALL, "application/octet-stream", 415),
        ):
            error_of(await client.post("/predict", content=content, headers={"content-type": kind}), status)
        error_of(await client.post("/tasks", content=SMALL, headers={"content-type": "image/png"}), 415)


async def test_a_threshold_of_ones_own(world: World, model: Path):
    picture = pictures(world, "ash", "test")[0]
    async with serving(model) as client:
        answers = [
            (await client.post(f"/predict?threshold={value}", files=files(picture))).json()["answers"][0]
            for value in (0, 1)
        ]
        assert answers[0]["label"] == answers[0]["top"][0]["label"]
        assert answers[1]["label"] is None
        error_of(await client.post("/predict?threshold=2", files=files(picture)), 422)


async def test_every_answer_has_a_type(model: Path):
    async with serving(model) as client:
        schema = (await client.get("/openapi.json")).json()
    others = ("/metrics", "/review/{item}/image", "/explain")  # text and pictures
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            good = next(about["responses"][code] for code in ("200", "201", "202") if code in about["responses"])
            assert path in others or good["content"]["application/json"]["schema"], (method, path)
    named = schema["components"]["schemas"]
    assert set(named["Prediction"]["required"]) >= {"label", "probability", "top", "version"}
    assert "image/*" in schema["paths"]["/predict"]["post"]["requestBody"]["content"]


def named(served: ServedModel, seen: list[np.ndarray]) -> set[str]:
    found = served.answers(np.stack(seen), [9] * len(seen))
    return {score.label for each in found for score in each.answer.top}


@pytest.fixture
def plain(world: World, tmp_path: Path) -> Path:
    """A model whose graph is quickly exported: one pass, and no prompts."""
    learner = ContinualLearner(str(world.weights), "lda", device="cpu")
    learner.learn({name: pictures(world, name) for name in ("ash", "birch")}, "first")
    learner.learn({"cedar": pictures(world, "cedar")}, "second")
    return learner.save(tmp_path / "plain")


@pytest.mark.parametrize("int8", [False, True])
def test_onnx_runtime_answers_as_pytorch_does(world: World, plain: Path, int8: bool):
    pytest.importorskip("onnxruntime")
    served = ServedModel(plain, engine=Engine("onnx", int8))
    try:
        seen = [served.learner.pixels(path) for path in pictures(world, "ash", "test")]
        slow = served.answers(np.stack(seen), [3] * len(seen))
        agreement = served.accelerate()
        assert agreement is not None
        assert agreement.comparison.images == 50
        assert "of 50 pictures of the package's 'mini'" in agreement.sentence()
        fast = served.answers(np.stack(seen), [3] * len(seen))
        alone = [served.answers(each[None], [3])[0] for each in seen]
        assert [found.answer for found in fast] == [found.answer for found in alone]  # others do not change an answer
        for one, other in zip(slow, fast, strict=True):
            assert other.answer.probability == pytest.approx(one.answer.probability, abs=0.1 if int8 else 1e-4)
            assert other.version == one.version
        assert describe(served)["engine"]["agreement"]["images"] == 50
        assert list(served.work.iterdir()) == []  # the file is not left
        served.change(lambda learner: learner.forget("first", "task"))
        assert served.agreement is None  # PyTorch answers until the engine is ready again
        assert named(served, seen) == {"cedar"}
        if not int8:  # which makes no difference here
            assert served.accelerate() is not None
            assert named(served, seen) == {"cedar"}
    finally:
        served.close()


def test_labelled_pictures_tell_the_change_of_accuracy(world: World, plain: Path, tmp_path: Path):
    pytest.importorskip("onnxruntime")
    (tmp_path / "known").mkdir()
    (tmp_path / "known" / "ash").symlink_to(world.images / "test" / "ash")
    served = ServedModel(plain, engine=Engine("onnx", check=tmp_path / "known"))
    try:
        agreement = served.accelerate()
        assert agreement is not None
        assert agreement.comparison.before == agreement.comparison.after
        assert "accuracy" in agreement.sentence()
        assert str(tmp_path) not in str(agreement.to_dict())  # clients need not know where it lies
    finally:
        served.close()


async def test_the_client_of_the_package(world: World, model: Path):
    async with listening(model, Limits()) as wire:
        client = Client(f"http://127.0.0.1:{wire.port}", TOKEN)
        ash = pictures(world, "ash", "test")[0]

        def talk() -> None:
            answer = client.predict(ash, top_k=2)
            assert len(answer["top"]) == 2
            assert client.predict(ash.read_bytes())["label"] == answer["label"]
            assert client.predict(ash, threshold=1.0)["label"] is None
            many = client.predict_many([ash, b"no picture"])
            assert many[0]["label"] == answer["label"]
            assert many[1]["status"] == 422
            job = client.teach({"elm": pictures(world, "elm"), "fir": pictures(world, "fir")}, name="third")
            seen: list[str] = []
            done = client.wait(job, seen=lambda found: seen.append(found["state"]))
            assert seen[-1] == "done"
            assert client.info()["tasks"][-1]["name"] == "third"
            assert client.forget(label="elm")["forgot"] == "elm"
            assert client.forget(task=done["task"])["forgot"] == "third"
            with pytest.raises(RefusedError, match="there is no task") as refused:
                client.forget(task=done["task"])
            assert refused.value.status == 404
            gone = client.forget(task=done["task"], purge=True)  # of the versions that still have it
            assert (gone["before"], len(gone["purged"])) == (True, 2)
            with pytest.raises(RefusedError, match="token"):
                Client(client.url).forget(label="ash")
            with pytest.raises(DualPromptError, match="either"):
                client.forget()

        await asyncio.to_thread(talk)
    with pytest.raises(DualPromptError, match="does not answer"):
        client.info()
    with pytest.raises(DualPromptError, match="no address"):
        Client("ftp://here")
    with pytest.raises(DualPromptError, match="slash"):
        Client("http://127.0.0.1:1").teach({"oak/red": [b"-"]})  # or it would be learned as 'oak'
