"""The queue of pictures to look at: what cannot be read, how pictures are shown, and that nothing is lost or left."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dualprompt import ContinualLearner
from sandbox import World, call, pictures
from serving import SMALL, error_of, finished, png, serving, until_running

from dualprompt.hosted.review import Review, Reviewed  # isort: skip (after serving, which skips without the extra)
from dualprompt.inbound.limits import Limits  # isort: skip
from dualprompt.serve.reviewing import SHOWN  # isort: skip

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("quick_python")]


async def corrected(client: Any, label: str, content: bytes) -> int:
    """Say what a picture shows; return its number in the queue."""
    reply = await client.post("/review", files={"images": ("a.png", content)}, data={"label": label})
    assert reply.status_code == 201, reply.text
    return reply.json()["id"]


async def shown(client: Any, number: int) -> Image.Image:
    """The picture as the page shows it."""
    return Image.open(io.BytesIO((await client.get(f"/review/{number}/image")).content))


def jpeg(width: int = 200, height: int = 200, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((width, height), 80).save(file, "JPEG", **options)
    return file.getvalue()


async def test_half_a_picture_is_refused(model: Path):
    async with serving(model, review_days=2) as client:
        whole = jpeg()
        sent = {"files": {"images": ("a.jpg", whole[: len(whole) // 2])}, "data": {"label": "ash"}}
        assert "truncated or damaged" in error_of(await client.post("/review", **sent), 422)
        assert (await client.get("/review")).json()["items"] == []
        assert await corrected(client, "ash", whole)


async def test_pictures_to_look_at_go_through_the_decoders(model: Path):
    async with serving(model, review_days=2, limits=Limits(queued_pixels=1000)) as client:
        sent = {"files": {"images": ("a.png", png(40, 40))}, "data": {"label": "ash"}}
        assert "1600 pixels" in error_of(await client.post("/review", **sent), 413)


async def test_what_was_damaged_on_disk_is_named_with_a_remedy(world: World, model: Path):
    ash = pictures(world, "ash", "test")
    async with serving(model, review_days=2) as client:
        bad, gone, good = [await corrected(client, "ash", path.read_bytes()) for path in ash[:3]]
        folder = model / ".serve" / "review"
        whole = jpeg()
        (folder / f"{bad:06}.image").write_bytes(whole[: len(whole) // 2])
        assert "damaged" in error_of(await client.get(f"/review/{bad}/image"), 422)
        (folder / f"{gone:06}.image").unlink()
        for reply in (await client.get(f"/review/{gone}/image"), await client.post("/review-lesson")):
            told = error_of(reply, 422)
            assert f"picture {gone} to look at ('a.png') cannot be read" in told
            assert "DELETE /review/ID" in told
        await client.delete(f"/review/{gone}")
        job = await finished(client, (await client.post("/review-lesson")).json()["id"])
        assert f"picture {bad} to look at" in job["error"]
        assert "DELETE /review/ID" in job["error"]
        assert "skip_bad" not in job["error"]
        await client.delete(f"/review/{bad}")
        job = await finished(client, (await client.post("/review-lesson")).json()["id"])
        assert (job["error"], job["images"]) == (None, 1)
        assert good


async def test_pictures_are_shown_small_upright_and_on_white(model: Path):
    lying = Image.new("RGB", (SHOWN * 4, SHOWN), "red")
    lying.paste("blue", (0, 0, SHOWN * 2, SHOWN))
    tags = Image.Exif()
    tags[0x0112] = 6  # to be turned a quarter clockwise
    file = io.BytesIO()
    lying.save(file, "JPEG", exif=tags)
    async with serving(model, review_days=2) as client:
        upright = await shown(client, await corrected(client, "ash", file.getvalue()))
        assert upright.size == (SHOWN // 4, SHOWN)
        top = upright.convert("RGB").crop((0, 0, 9, 9)).tobytes()  # where the left half is now
        assert top[2] > 200 > 50 > top[0]
        clear = await shown(client, await corrected(client, "ash", png(mode="RGBA")))
        assert clear.convert("RGB").getpixel((10, 10)) == (255, 255, 255)
        reply = await client.get("/review/2/image")
        assert (reply.headers["content-type"], len(reply.content) < 5000) == ("image/png", True)


async def named(client: Any) -> dict[int, str | None]:
    """What the pictures of the queue are called, by their numbers."""
    return {item["id"]: item["label"] for item in (await client.get("/review")).json()["items"]}


async def test_what_is_corrected_while_it_is_learned_stays(world: World, model: Path):
    ash = pictures(world, "ash", "test")
    async with serving(model, review_days=2) as client:
        first, second, third = [await corrected(client, "ash", path.read_bytes()) for path in ash[:3]]
        job = (await client.post("/review-lesson")).json()["id"]
        await client.post(f"/review/{second}", json={"label": "birch"})
        await client.post(f"/review/{third}", json={"label": None})
        assert (await finished(client, job))["error"] is None
        assert await named(client) == {second: "birch", third: None}
        job = await finished(client, (await client.post("/review-lesson")).json()["id"])
        assert (job["images"], job["classes"]) == (1, ["birch"])
        assert await named(client) == {third: None}
        assert first


async def test_pictures_are_not_taken_by_two_lessons(world: World, model: Path):
    ash = pictures(world, "ash", "test")
    async with serving(model, review_days=2) as client:
        await corrected(client, "ash", ash[0].read_bytes())
        replies = await asyncio.gather(*(client.post("/review-lesson") for _ in range(2)))
        assert sorted(reply.status_code for reply in replies) == [202, 409]
        assert "being learned already" in error_of(await client.post("/review-lesson"), 409)
        await corrected(client, "ash", ash[1].read_bytes())
        job = await finished(client, (await client.post("/review-lesson")).json()["id"])
        assert (job["error"], job["images"]) == (None, 1)
        assert await named(client) == {}


async def test_what_was_learned_is_deleted_after_a_restart_too(world: World, model: Path):
    ash = pictures(world, "ash", "test")
    async with serving(model, review_days=2) as client:
        for path in ash[:2]:
            await corrected(client, "ash", path.read_bytes())
        job = (await client.post("/review-lesson")).json()["id"]
        await until_running(client, job)
    async with serving(model, review_days=2) as client:
        assert set((await named(client)).values()) == {"ash"}
        assert (await finished(client, job))["error"] is None
        assert await named(client) == {}


def test_a_later_picture_of_the_same_number_is_not_taken_for_the_learned_one(tmp_path: Path):
    review = Review(tmp_path, Limits(), 3, lambda: 1e9)
    review.start()
    item = review.add(SMALL, "wrong", "a.png", None, "ash")
    assert item
    review.learned([Reviewed(item.id, 5e8, "ash"), Reviewed(99, 1e9, "ash")])
    assert review.items() == [item]
    review.learned([Reviewed(item.id, 1e9, "ash")])
    assert review.items() == list(tmp_path.iterdir()) == []


async def test_names_follow_the_model(world: World, model: Path):
    ash = pictures(world, "ash", "test")[0].read_bytes()
    async with serving(model, review_days=2) as client:
        first, second, third = [await corrected(client, name, ash) for name in ("ash", "birch", "cedar")]
        await client.post("/rename", json={"old": "ash", "new": "Rowan\u0065\u0301"})
        assert await named(client) == {first: "Rowan\u00e9", second: "birch", third: "cedar"}
        error_of(await client.post("/rename", json={"old": "birch", "new": "cedar"}), 422)
        await client.post("/merge", json={"classes": ["birch", "cedar"], "into": "cedar"})
        assert await named(client) == {first: "Rowan\u00e9", second: "cedar", third: "cedar"}
    async with serving(model, review_days=2) as client:  # it is so on disk too
        assert await named(client) == {first: "Rowan\u00e9", second: "cedar", third: "cedar"}
        job = await finished(client, (await client.post("/review-lesson")).json()["id"])
        assert (job["error"], job["images"]) == (None, 3)


async def test_pictures_of_what_is_forgotten_are_named_again_or_purged(world: World, model: Path):
    ash = pictures(world, "ash", "test")[0].read_bytes()
    async with serving(model, review_days=2) as client:
        first, second, third = [await corrected(client, name, ash) for name in ("ash", "birch", "cedar")]
        await client.delete("/classes/ash")
        assert await named(client) == {first: None, second: "birch", third: "cedar"}
        await client.delete("/classes/birch?purge=true")
        assert await named(client) == {first: None, third: "cedar"}
        assert not list((model / ".serve" / "review").glob(f"{second:06}.*"))
        task = next(task["id"] for task in (await client.get("/model")).json()["tasks"] if "cedar" in task["classes"])
        await client.delete(f"/tasks/{task}?purge=true")
        assert await named(client) == {first: None}


async def test_a_picture_of_an_unknown_class_is_named(world: World, model: Path):
    async with serving(model, review_days=2) as client:
        await client.post("/rename", json={"old": "ash", "new": "Rowan"})
        number = await corrected(client, "Rowan", pictures(world, "ash", "test")[0].read_bytes())
        await client.post("/rollback", json={})
        told = error_of(await client.post("/review-lesson"), 409)
        assert f"picture {number} to look at ('a.png') is named 'Rowan'" in told
        assert "name it again or remove it" in told
        await client.post(f"/review/{number}", json={"label": "ash"})
        assert (await finished(client, (await client.post("/review-lesson")).json()["id"]))["error"] is None


async def test_a_command_that_purges_deletes_what_was_called_so(model: Path):
    async with serving(model, review_days=2) as client:
        for label in ("ash", "birch", "ash", "cedar"):
            await corrected(client, label, SMALL)
    folder = model / ".serve" / "review"

    def left() -> list[str]:
        return sorted(path.name for path in folder.iterdir())

    assert call("rename", model, "ash", "Rowan").code == 0
    aside = folder.rename(model / "elsewhere")
    folder.symlink_to(aside)
    assert "link" in call("forget", model, "Rowan", "--purge").error
    folder.unlink()
    aside.rename(folder)
    done = call("forget", model, "Rowan", "--purge")  # the same again
    assert done.code == 0, done.err
    assert "removed 2 pictures of it that a server kept to be looked at" in done.out
    assert left() == ["000002.image", "000002.json", "000004.image", "000004.json"]
    task = ContinualLearner.load(model, "cpu").tasks[0]
    assert call("forget", model, task.name, "--task").code == 0
    done = call("forget", model, task.name, "--task", "--purge")
    assert "removed 1 picture of it" in done.out, done.err
    assert left() == ["000004.image", "000004.json"]
