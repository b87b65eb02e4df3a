"""What comes beside good pictures in an upload is told by name and reason, and left out where that is asked for."""

from __future__ import annotations

import io
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dualprompt.errors import DualPromptError
from dualprompt.files import write_json
from dualprompt.hosted.teach import LESSON, Lesson, Reporter, teach
from dualprompt.learner import ContinualLearner
from sandbox import World, pictures
from serving import archive, error_of, finished, png, serving, uploads


def months(world: World) -> dict[str, bytes]:
    """Two months of classes, as a zip has them."""
    return {
        f"photos/{month}/{name}/{path.name}": path.read_bytes()
        for month, name in (("january", "cedar"), ("january", "elm"), ("february", "elm"))
        for path in pictures(world, name)[:2]
    }


def form(entries: dict[str, bytes], **fields: str) -> dict[str, Any]:
    return {"files": [("archive", ("a.zip", archive(entries)))], "data": fields}


@pytest.mark.anyio
async def test_months_of_classes_are_asked_about_not_learned(world: World, model: Path) -> None:
    async with serving(model) as client:
        said = error_of(await client.post("/tasks", **form(months(world))), 422)
        assert "one level too high: it holds folders of folders ('january' holds 'cedar', 'elm')" in said
        assert "nested=true that 'january', 'february' are the classes" in said
        named = [("images", (f"{month}/fir/{n}.png", png(20 + n))) for n, month in enumerate(("may", "june", "may"))]
        assert (await client.post("/tasks", files=named)).status_code == 202  # one folder of the same name in each
        assert uploads(model) != []
        await client.delete("/jobs/2")
        begun = await client.post("/tasks", **form(months(world), nested="true"))
        assert begun.status_code == 202
        job = (await client.get(begun.json()["url"])).json()
        assert job["classes"] == ["february", "january"]
        await client.delete(begun.json()["url"])
        assert "nested takes true or false" in error_of(await client.post("/tasks", **form({}, nested="maybe")), 422)


@pytest.mark.anyio
async def test_a_check_names_all_and_learning_leaves_out_what_it_is_told_to(world: World, model: Path) -> None:
    trees = {"oak": pictures(world, "cedar"), "yew": pictures(world, "elm")}
    good = {f"{name}/{n}.png": path.read_bytes() for name in ("oak", "yew") for n, path in enumerate(trees[name])}
    torn = pictures(world, "elm")[0].read_bytes()[:-60]  # whose header is whole
    odd = {
        "oak/notes.txt": b"!",
        "__MACOSX/oak/._0.png": b"?",
        "oak/broken.png": b"no image",
        "yew/torn.png": torn,
    }
    async with serving(model) as client:
        begun = await client.post("/check", **form(good | odd))
        assert begun.status_code == 202, begun.text
        await finished(client, begun.json()["id"])
        lines = (await client.get(f"{begun.json()['url']}/findings")).json()["lines"]
        told = "\n".join(lines)
        assert "left out: oak/notes.txt (not named like an image ('.txt'))" in told
        assert "left out: __MACOSX/oak/._0.png (a file of the operating system)" in told
        assert "cannot be used: 'oak/broken.png' is not an image that can be read" in told
        assert "cannot be used: yew/torn.png cannot be read" in told

        said = error_of(await client.post("/tasks", **form(good | odd)), 422)
        assert said.startswith("'oak/broken.png' is not an image")
        assert said.endswith("skip_bad=true leaves out what cannot be read")
        alone = good | {"fir/broken.png": b"no image"}
        said = error_of(await client.post("/tasks", **form(alone, skip_bad="true")), 422)
        assert said == "class 'fir' has no image that can be read; give some or leave it out"
        assert uploads(model) == []


def test_a_job_leaves_out_what_it_is_told_to(world: World, model: Path, tmp_path: Path) -> None:
    job, threads = tmp_path / "000001", torch.get_num_threads()
    (job / "images").mkdir(parents=True)
    files = [*pictures(world, "cedar")[:2], *pictures(world, "elm")[:2]]
    for number, path in enumerate(files):
        (job / "images" / f"{number:06}.png").write_bytes(path.read_bytes()[: -60 if number == 3 else None])
    named = [(f"{number:06}.png", f"tree/{number}.png") for number in range(4)]
    lesson = Lesson("Trees", None, False, {"oak": named[:2], "yew": named[2:]})  # type: ignore[arg-type]
    try:
        write_json(job / LESSON, asdict(lesson))
        with pytest.raises(DualPromptError, match=r"tree/3.png cannot be read.*\(skip_bad=true leaves them out"):
            teach(model, job, Reporter(io.StringIO()))
        write_json(job / LESSON, asdict(replace(lesson, skip_bad=True)))
        teach(model, job, Reporter(told := io.StringIO()))
    finally:
        torch.set_num_threads(threads)
    assert "left out: tree/3.png" in told.getvalue()
    assert ContinualLearner.load(model, "cpu").tasks[-1].images == 3


@pytest.mark.anyio
async def test_quotes_in_names_come_as_they_are(model: Path) -> None:
    """HTTP clients write them as %22, and newlines as %0A."""
    named = [("images", (f'5" {kind}/{n}.png', png(30 + n))) for n, kind in enumerate(("nail", "nail", "bolt", "bolt"))]
    async with serving(model) as client:
        begun = await client.post("/tasks", files=named)
        assert begun.status_code == 202
        job = (await client.get(begun.json()["url"])).json()
        assert job["classes"] == ['5" bolt', '5" nail']
        await client.delete(begun.json()["url"])
        said = error_of(await client.post("/tasks", files=[("images", ("two\nlines/1.png", png(1)))]), 422)
        assert "cannot be the name of a class" in said
