"""Changes without a lesson, undo, more images of known classes, and the queue of pictures to look at."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dualprompt import ContinualLearner
from sandbox import World, pictures
from serving import SMALL, error_of, files, finished, lesson, serving

from dualprompt.hosted.drift import HOURS, Drift  # isort: skip (after serving, which skips where the extra is missing)
from dualprompt.hosted.review import DAY, Review  # isort: skip
from dualprompt.inbound.limits import Limits, Refusal  # isort: skip

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("quick_python")]
NOBODY = {"authorization": ""}


async def test_rename_merge_and_undo(model: Path):
    async with serving(model) as client:
        known = (await client.get("/model")).json()["classes"]
        reply = await client.post("/rename", json={"old": "ash", "new": "Rowan"})
        assert reply.json()["classes"] == ["Rowan" if name == "ash" else name for name in known]
        reply = await client.post("/merge", json={"classes": ["Rowan", "birch"], "into": "tree"})
        assert "tree" in reply.json()["classes"]
        assert not {"Rowan", "birch"} & set(reply.json()["classes"])
        listed = (await client.get("/versions")).json()["versions"]
        assert [version["current"] for version in listed] == [False, False, True]
        assert set((await client.post("/rollback", json={})).json()["classes"]) >= {"Rowan", "birch"}
        first = (await client.post("/rollback", json={"number": listed[0]["number"]})).json()
        assert first["classes"] == known
        assert (await client.get("/model")).json()["model_version"] == first["model_version"]
    assert list(ContinualLearner.load(model, "cpu").classes) == known


async def test_a_model_that_is_damaged_while_it_is_served_can_be_gone_back_from(model: Path):
    async with serving(model) as client:
        known = (await client.get("/model")).json()["classes"]
        assert (await client.post("/rename", json={"old": "ash", "new": "Rowan"})).status_code == 200
        (model / "model.json").write_text("{")
        error_of(await client.post("/rename", json={"old": "birch", "new": "Beech"}), 422)
        listed = (await client.get("/versions")).json()["versions"]
        assert [version["current"] for version in listed] == [False]
        reply = await client.post("/rollback", json={})
        assert reply.status_code == 200, reply.text
        assert reply.json()["classes"] == known
        assert (await client.post("/rename", json={"old": "birch", "new": "Beech"})).status_code == 200


async def test_wishes_that_cannot_be_fulfilled(model: Path):
    async with serving(model, limits=Limits(json_bytes=300)) as client:
        version = (await client.get("/model")).json()["model_version"]
        for path, wish, status in (
            ("/rename", {"old": "nobody", "new": "x"}, 404),
            ("/rename", {"old": "ash", "new": "birch"}, 422),
            ("/rename", {"old": "ash", "new": "two\nlines"}, 422),
            ("/rename", {"old": "ash"}, 422),
            ("/rename", {"old": "ash", "new": "x", "more": 1}, 422),
            ("/rename", ["ash"], 422),
            ("/rename", {"old": "ash", "new": "x" * 400}, 413),
            ("/merge", {"classes": ["ash", "nobody"], "into": "x"}, 404),
            ("/merge", {"classes": ["ash"], "into": "ash"}, 422),
            ("/threshold", {"threshold": 2}, 422),
            ("/threshold", {"threshold": "high"}, 422),
            ("/rollback", {"number": 99}, 409),
            ("/rollback", {"number": "one"}, 422),
        ):
            assert error_of(await client.post(path, json=wish), status), (path, wish)
        error_of(await client.post("/rename", content=b"{", headers={"content-type": "application/json"}), 422)
        error_of(await client.post("/rename", data={"old": "ash", "new": "x"}), 415)
        for path in ("/rename", "/merge", "/threshold", "/rollback", "/more", "/check", "/review", "/review/1"):
            error_of(await client.post(path, json={}, headers=NOBODY), 401)
        assert (await client.get("/model")).json()["model_version"] == version


async def test_the_threshold_is_kept_and_used(world: World, model: Path):
    async with serving(model) as client:
        assert (await client.post("/threshold", json={"threshold": 1.0})).status_code == 200
        reply = await client.post("/predict", files=files(*pictures(world, "ash", "test")))
        assert {answer["label"] for answer in reply.json()["answers"]} == {None}
        hours = (await client.get("/answers")).json()["hours"]
        assert [(hour["answers"], hour["unsure"]) for hour in hours] == [(5, 5)]
        assert 'dualprompt_answers_total{trust="unsure"} 5.0' in (await client.get("/metrics")).text
    assert ContinualLearner.load(model, "cpu").threshold == 1.0


async def test_more_images_of_known_classes(world: World, model: Path):
    async with serving(model) as client:
        images = sum(task["images"] for task in (await client.get("/model")).json()["tasks"])
        job = (await client.post("/more", files=lesson(world, "ash"))).json()["id"]
        done = await finished(client, job)
        assert (done["error"], done["kind"], done["images"]) == (None, "more", 6)
        now = (await client.get("/model")).json()
        assert sum(task["images"] for task in now["tasks"]) == images + 6
        assert now["classes"] == ["ash", "birch", "cedar"]
        assert "does not know 'elm'" in error_of(await client.post("/more", files=lesson(world, "ash", "elm")), 409)
        error_of(await client.post("/more", files={"images": ("ash/1.png", b"no picture")}), 422)


async def test_what_is_purged_is_in_no_version(model: Path):
    async with serving(model) as client:
        assert (await client.delete("/classes/ash")).status_code == 200
        held = [version["classes"] for version in (await client.get("/versions")).json()["versions"]]
        assert "ash" in held[0]
        assert (await client.delete("/classes/birch?purge=true")).status_code == 200
        held = [version["classes"] for version in (await client.get("/versions")).json()["versions"]]
        assert not any({"ash", "birch"} & set(classes) for classes in held)


async def test_every_version_that_held_a_class_is_purged(world: World, model: Path):
    async with serving(model) as client:

        async def holding(name: str) -> list[int]:
            found = (await client.get("/versions")).json()["versions"]
            return [version["number"] for version in found if name in version["classes"]]

        async def teach() -> None:
            job = (await client.post("/tasks", files=lesson(world, "elm"))).json()["id"]
            assert (await finished(client, job))["error"] is None

        await teach()
        assert (await client.delete("/classes/elm")).json()["purged"] == []
        await teach()  # again, as another task
        held = await holding("elm")
        assert len(held) == 2
        gone = (await client.delete("/classes/elm?purge=true")).json()
        assert (gone["forgot"], gone["before"]) == ("elm", False)
        assert set(held) <= set(gone["purged"])
        assert await holding("elm") == []


async def test_what_was_forgotten_before_can_be_purged_later(model: Path):
    async with serving(model) as client:
        tasks = (await client.get("/model")).json()["tasks"]
        cedar = next(task["id"] for task in tasks if task["classes"] == ["cedar"])
        assert (await client.delete(f"/tasks/{cedar}")).status_code == 200
        version = (await client.get("/model")).json()["model_version"]
        for path in ("/classes/cedar", f"/tasks/{cedar}"):
            error_of(await client.delete(path), 404)
        gone = (await client.delete("/classes/cedar?purge=true")).json()
        assert (gone["forgot"], gone["before"], gone["model_version"]) == ("cedar", True, version)
        assert len(gone["purged"]) == 1
        held = [version["classes"] for version in (await client.get("/versions")).json()["versions"]]
        assert held == [["ash", "birch"]]
        for path in ("/classes/cedar", f"/tasks/{cedar}", "/classes/oak", "/tasks/99"):
            error_of(await client.delete(f"{path}?purge=true"), 404)


async def test_a_task_that_was_forgotten_before_can_be_purged_later(model: Path):
    async with serving(model) as client:
        first = (await client.get("/model")).json()["tasks"][0]
        await client.delete(f"/tasks/{first['id']}")
        gone = (await client.delete(f"/tasks/{first['id']}?purge=true")).json()
        assert (gone["forgot"], gone["before"], len(gone["purged"])) == (f"task {first['id']}", True, 1)
        assert len((await client.get("/versions")).json()["versions"]) == 1


def correction(label: str, content: bytes = SMALL) -> dict[str, Any]:
    return {"files": {"images": ("a.png", content)}, "data": {"label": label, "answered": "birch"}}


async def test_pictures_are_kept_only_where_that_is_turned_on(world: World, model: Path):
    async with serving(model) as client:
        assert "--review DAYS" in error_of(await client.post("/review", **correction("ash")), 409)
        assert (await client.get("/review")).json() == {"on": False, "days": None, "items": []}
        await client.post("/threshold", json={"threshold": 1.0})
        await client.post("/predict", files=files(*pictures(world, "ash", "test")))
    assert not (model / ".serve" / "review").exists()


async def test_review_correct_learn_and_delete(world: World, model: Path):
    ash = pictures(world, "ash", "test")
    async with serving(model, review_days=2) as client:
        await client.post("/threshold", json={"threshold": 1.0})
        await client.post("/predict", files=files(*ash[:2]))
        wrong = await client.post("/review", **correction("ash", ash[2].read_bytes()))
        assert wrong.status_code == 201
        listed = (await client.get("/review")).json()
        assert [(item["why"], item["label"]) for item in listed["items"]] == [
            ("unsure", None),
            ("unsure", None),
            ("wrong", "ash"),
        ]
        first, second, third = (item["id"] for item in listed["items"])
        picture = await client.get(f"/review/{first}/image")
        assert (picture.headers["content-type"], picture.content[:4]) == ("image/png", b"\x89PNG")
        assert (await client.post(f"/review/{first}", json={"label": "ash"})).json()["label"] == "ash"
        assert (await client.delete(f"/review/{second}")).status_code == 200
        for path in (f"/review/{second}/image", "/review/99/image"):
            error_of(await client.get(path), 404)
        for path in ("/review", f"/review/{first}/image"):
            error_of(await client.get(path, headers=NOBODY), 401)
        error_of(await client.post(f"/review/{first}", json={"label": "elm"}), 409)
        error_of(await client.post("/review", **correction("elm")), 409)
        error_of(await client.post("/review", **correction("ash", b"no picture")), 422)
        error_of(await client.post("/review", data={"label": "ash"}), 415)
        error_of(await client.post("/review", files=[*files(*ash[:2])], data={"label": "ash"}), 422)
        job = await finished(client, (await client.post("/review-lesson")).json()["id"])
        assert (job["error"], job["images"], job["kind"]) == (None, 2, "more")
        assert (await client.get("/review")).json()["items"] == []
        error_of(await client.post("/review-lesson"), 409)
        assert third
        await client.post("/review", **correction("ash"))
    assert len(list((model / ".serve" / "review").iterdir())) == 2
    async with serving(model, review_days=2) as client:
        assert len((await client.get("/review")).json()["items"]) == 1  # it is still there
    async with serving(model):
        assert list((model / ".serve" / "review").iterdir()) == []  # turned off: what was kept is deleted


def test_pictures_stay_so_long_and_no_longer(tmp_path: Path):
    now = [1e9]
    review = Review(tmp_path, Limits(review_images=2), 3, lambda: now[0])
    review.start()
    first = review.add(SMALL, "unsure", "a.png", None)
    now[0] += 2 * DAY
    assert review.add(SMALL, "wrong", "b.png", None, "ash")
    assert review.add(SMALL, "unsure", "c.png", None) is None  # no room
    with pytest.raises(Refusal, match="full"):
        review.add(SMALL, "wrong", "d.png", None, "ash")
    assert first
    now[0] += 1.5 * DAY
    assert [item.name for item in review.items()] == ["b.png"]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".image", ".json"]


def test_a_strangers_queue_is_not_believed(tmp_path: Path):
    (tmp_path / "000001.json").write_text('{"id": 7, "added": 1e9, "why": "wrong", "name": "x", "answered": null}')
    (tmp_path / "000002.json").write_text("[]")
    (tmp_path / "000003.image").write_bytes(SMALL)
    (tmp_path / "notes.txt").write_text("not ours")
    review = Review(tmp_path, Limits(), 3)
    review.start()
    assert review.items() == []
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_drift_counts_two_weeks_of_hours():
    now = [3600.0 * 1000]
    drift = Drift(lambda: now[0])
    drift.count(True)
    drift.count(False)
    now[0] += 3600
    drift.count(False)
    assert [(hour.answers, hour.unsure) for hour in drift.hours()] == [(2, 1), (1, 0)]
    now[0] += HOURS * 3600
    drift.count(True)
    assert [(hour.answers, hour.unsure) for hour in drift.hours()] == [(1, 1)]


async def test_where_it_looks(world: World, model: Path, tmp_path: Path):
    ash = pictures(world, "ash", "test")
    async with serving(model, limits=Limits(explaining=1)) as client:
        reply = await client.post("/explain", files=files(ash[0]))
        assert (reply.status_code, reply.headers["content-type"]) == (200, "image/png")
        other = await client.post("/explain", content=ash[0].read_bytes(), headers={"content-type": "image/png"})
        assert other.content == reply.content
        with Image.open(io.BytesIO(reply.content)) as shown:
            assert len(shown.getcolors(10_000) or ()) > 2
        error_of(await client.post("/explain", files=files(*ash[:2])), 413)
        error_of(await client.post("/explain", files={"images": b"no picture"}), 422)
        error_of(await client.post("/explain", json={}), 415)
        client.service._explaining = 1
        error_of(await client.post("/explain", files=files(ash[0])), 429)
    empty = ContinualLearner(str(world.weights), "lda", device="cpu").save(tmp_path / "empty")
    async with serving(empty) as client:
        error_of(await client.post("/explain", files=files(ash[0])), 409)
