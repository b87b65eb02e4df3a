"""The queue of pictures to look at: what cannot be read, how pictures are shown, and that nothing is lost or left."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sandbox import World, pictures
from serving import error_of, finished, png, serving

from dualprompt.inbound.limits import Limits  # isort: skip (after serving, which skips where the extra is missing)
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
