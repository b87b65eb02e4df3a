"""Clients that would keep others out: silent, half said, not listening, leaving, or with pictures that grow."""

from __future__ import annotations

import asyncio
import io
import logging
import resource
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from serving import SHOWN, SMALL, error_of, listening, pieces, png, serving

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from dualprompt.errors import DualPromptError
from dualprompt.inbound.decoding import AbandonedError, Decoders, Source, cost_of
from dualprompt.inbound.limits import Limits, Refusal
from dualprompt.inbound.wire import Sparing, within_files
from dualprompt.learner import ContinualLearner

pytestmark = pytest.mark.anyio

GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = (
    b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=xx\r\n"
    b"content-length: %d\r\n\r\n"
)


def form(*contents: bytes) -> bytes:
    """A whole request to /predict."""
    head = b'--xx\r\ncontent-disposition: form-data; name="images"; filename="a.png"\r\n\r\n'
    body = b"".join(head + content + b"\r\n" for content in contents) + b"--xx--\r\n"
    return POST % len(body) + body


@pytest.mark.parametrize(
    "said",
    [b"", b"G", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 9000, GET + b"GET /mod"],
    ids=["nothing", "a letter", "a line", "half a header", "half of a second request"],
)
async def test_who_does_not_say_what_it_asks_is_closed(model: Path, said: bytes):
    async with listening(model, Limits(header_seconds=0.2, idle_seconds=1)) as wire:
        reader, _ = await wire.connect(said)
        async with asyncio.timeout(20):
            await reader.read(-1)  # until it is closed
        assert wire.server.server_state.connections == set()
        assert await wire.status("/healthz") == 200


async def test_bytes_one_by_one_win_no_time(model: Path):
    async with listening(model, Limits(header_seconds=0.2)) as wire:
        _, writer = await wire.connect(b"GET / HTTP/1.1\r\nx: ")
        began = time.monotonic()
        while not writer.transport.is_closing() and time.monotonic() - began < 20:
            writer.write(b"y")
            await asyncio.sleep(0.02)
            if not wire.server.server_state.connections:
                break
        assert wire.server.server_state.connections == set()


async def test_an_endless_body_that_nobody_asked_for_ends(model: Path):
    async with listening(model, Limits(header_seconds=0.2)) as wire:
        said = b"DELETE /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n"
        reader, writer = await wire.connect(said)
        assert b"404" in await reader.readline()
        for _ in range(1000):
            writer.write(bytes(100))
            await asyncio.sleep(0.01)
            if not wire.server.server_state.connections:
                break
        assert wire.server.server_state.connections == set()


async def test_silent_connections_give_way_to_those_that_ask(model: Path):
    async with listening(model, Limits(connections=5)) as wire:
        for number in range(20):
            await wire.connect(b"" if number % 2 else b"GET / HTT")
            if number % 5 == 4:
                assert await wire.status("/healthz") == 200
        assert await wire.status("/model") == 200
        assert len(wire.server.server_state.connections) <= 5


async def test_stalled_bodies_give_way_too(model: Path):
    async with listening(model, Limits(connections=5, requests=2)) as wire:
        stalled = [await wire.connect(form(SMALL)[:-9]) for _ in range(5)]
        await wire.until(lambda: len(wire.server.server_state.tasks) == 5)
        reader, _ = await wire.connect(form(SMALL))
        assert b"200" in await reader.readline()
        assert await stalled[0][0].read() == b""  # the one that said its last word first
        stalled[4][1].write(form(SMALL)[-9:])
        assert b"200" in await stalled[4][0].readline()


async def test_who_is_being_answered_keeps_its_connection(model: Path):
    async with listening(model, Limits(connections=3, requests=1, small_pixels=1)) as wire:
        held = threading.Event()
        wire.service.decoders._large.submit(held.wait)
        reader, _ = await wire.connect(form(SMALL))
        await wire.until(lambda: wire.service.decoders.waiting)
        for _ in range(8):
            await wire.connect()
        assert await wire.status("/model") == 503
        other, _ = await wire.connect(form(SMALL))
        assert b"503" in await other.readline()
        assert await wire.status("/healthz") == 200
        held.set()
        assert b"200" in await reader.readline()
        assert await wire.status("/model") == 200


async def test_who_does_not_take_its_answers_is_closed(model: Path):
    async with listening(model, Limits(reading_seconds=0.2)) as wire:
        _, writer = await wire.connect()
        writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
        writer.write(b"GET /static/app.js HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000)
        await wire.until(lambda: wire.server.server_state.total_requests > 0)
        await wire.until(lambda: not wire.server.server_state.connections)
        assert await wire.status("/healthz") == 200


async def test_the_work_of_a_client_that_left_is_dropped(model: Path):
    async with listening(model, Limits(small_pixels=1)) as wire:
        held = threading.Event()
        wire.service.decoders._large.submit(held.wait)
        reader, writer = await wire.connect(form(*[png(300, 300)] * 9))
        await wire.until(lambda: wire.service.decoders.waiting == 9 * 90_000)
        writer.close()
        service = wire.service  # which lets go of it all while the thread is still held, one thing after the other
        await wire.until(lambda: service.decoders.waiting == service.batcher.coming == service._held == 0)
        held.set()
        assert await wire.status("/healthz") == 200
        assert b"dualprompt_batch_images_count 0.0" in wire.service.metrics.text()
        assert await reader.read() == b""


async def test_large_pictures_wait_for_each_other_and_small_ones_for_nobody(model: Path):
    limits = Limits(small_pixels=1000, decoded_pixels=100_000, queued_pixels=150_000)
    async with serving(model, limits=limits) as client:
        held = threading.Event()
        client.service.decoders._large.submit(held.wait)
        large = {"images": ("a.png", png(300, 300))}
        first = asyncio.create_task(client.post("/predict", files=large))
        while client.service.decoders.waiting == 0:
            await asyncio.sleep(0.01)
        refused = await client.post("/predict", files=large)
        assert "try again" in error_of(refused, 503)
        assert int(refused.headers["retry-after"]) > 0
        assert (await client.post("/predict", files={"images": SMALL})).status_code == 200
        together = [("images", ("a.png", png(300, 300)))] * 2
        assert "send fewer" in error_of(await client.post("/predict", files=together), 413)
        assert "other than JPEG" in error_of(await client.post("/predict", files={"images": png(400, 300)}), 413)
        assert not first.done()
        held.set()
        assert (await first).status_code == 200
        assert client.service.decoders.waiting == client.service._held == 0


async def test_the_time_for_an_answer_holds_for_decoding_too(model: Path):
    async with serving(model, limits=Limits(small_pixels=1, predict_seconds=0.1)) as client:
        held = threading.Event()
        client.service.decoders._large.submit(held.wait)
        assert "too busy" in error_of(await client.post("/predict", files={"images": SMALL}), 429)
        held.set()
        assert client.service.decoders.waiting == client.service._held == 0


async def test_decoders_stop_without_waiting_for_what_they_decode(model: Path):
    decoders = Decoders(Limits(small_pixels=1))
    held, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        held.wait()

    decoders._large.submit(hold)
    begun.wait()
    waiting = asyncio.create_task(decoders.decode([("a.png", SMALL)], ContinualLearner.load(model, "cpu")))
    while decoders.waiting == 0:
        await asyncio.sleep(0.01)
    decoders.stop()
    (refused,) = await waiting
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.message) == (503, "the server is stopping")
    assert not held.is_set()
    held.set()


def test_a_picture_is_read_only_as_long_as_somebody_waits():
    stop = threading.Event()
    source = Source(b"abcdef", stop)
    assert source.read(3) == b"abc"
    stop.set()
    with pytest.raises(AbandonedError):
        source.read(3)
    late = Source(b"abc", threading.Event())
    late.until = time.monotonic() - 1
    with pytest.raises(AbandonedError):
        late.read()


async def test_a_picture_that_takes_too_long_is_refused(model: Path):
    noisy = encoded(Image.effect_noise((700, 700), 90).convert("RGB"), "JPEG")
    async with serving(model, limits=Limits(image_seconds=0)) as client:
        assert "to decode" in error_of(await client.post("/predict", files={"images": noisy}), 413)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def variety() -> dict[str, bytes]:
    """Pictures of many kinds, all with detail, so that another way to decode would show."""
    noise = np.random.default_rng(0).integers(0, 256, (90, 130, 4), np.uint8)
    image = Image.fromarray(noise).resize((650, 450), Image.Resampling.BICUBIC)
    colour = image.convert("RGB")
    turned = Image.Exif()
    turned[0x0112] = 6
    return {
        "jpeg": encoded(colour, "JPEG"),
        "small jpeg": encoded(colour.resize((30, 20)), "JPEG"),
        "progressive": encoded(colour, "JPEG", progressive=True),
        "turned": encoded(colour, "JPEG", exif=turned),
        "grey": encoded(colour.convert("L"), "JPEG"),
        "cmyk": encoded(colour.convert("CMYK"), "JPEG"),
        "png": encoded(colour, "PNG"),
        "transparent": encoded(image, "PNG"),
        "palette": encoded(colour.convert("P"), "GIF"),
        "webp": encoded(image, "WEBP", lossless=True),
        "16 bit": encoded(Image.fromarray(noise[..., 0].astype(np.uint16) * 257), "PNG"),
        "several": encoded(colour, "MPO", save_all=True, append_images=[colour.resize((325, 225))]),
        "tiff": encoded(colour, "TIFF", compression="tiff_lzw"),
        "tiles": pieces(tile=(32, 64)),
    }


async def test_pictures_are_decoded_as_the_command_decodes_them(model: Path):
    learner = ContinualLearner.load(model, "cpu")
    decoders = Decoders(Limits(small_pixels=100_000))
    found = await decoders.decode(list(variety().items()), learner)
    decoders.stop()
    for (name, content), pixels in zip(variety().items(), found, strict=True):
        assert not isinstance(pixels, Refusal), (name, pixels)
        np.testing.assert_array_equal(pixels, learner.pixels(content), name)


def test_a_picture_costs_what_its_decoder_holds():
    def cost(content: bytes, side: int = 32) -> int:
        with Image.open(io.BytesIO(content)) as opened:
            return cost_of(opened, side)

    blank = Image.new("RGB", (4096, 2048))
    whole = 4096 * 2048
    assert cost(encoded(blank, "PNG")) == cost(encoded(blank, "WEBP", lossless=True, method=0)) == whole
    assert cost(pieces(tile=(32, 64))) == 32 * 64
    assert cost(pieces(rows=16)) == cost(pieces(tile=(16, 16))) == 16 * 16
    assert cost(encoded(blank, "JPEG")) == whole // 16
    assert cost(encoded(blank, "JPEG", progressive=True)) == whole // 4
    assert cost(encoded(blank, "JPEG"), side=1024) == whole  # too large a view for a smaller picture
    assert cost(encoded(blank, "JPEG"), side=512) == whole // 4


def test_connections_stay_below_what_the_system_lets_open(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (200, 200))
    limits = within_files(Limits())
    assert 8 <= limits.connections < 200 - 64
    assert 1 <= limits.requests <= limits.connections / 2
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50, 50))
    with pytest.raises(DualPromptError, match="ulimit -n"):
        within_files(Limits())
    for much in (2**20, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, much=much: (much, much))
        assert within_files(Limits()) == Limits()


def test_logs_are_limited_and_say_so(caplog: pytest.LogCaptureFixture):
    logger = logging.getLogger("dualprompt.crowd")
    logger.addFilter(Sparing(lines=3, seconds=0.2))
    for _ in range(100):
        logger.error("again %d", 1)
    assert [record.getMessage() for record in caplog.records][:2] == ["again 1"] * 2
    assert len(caplog.records) == 3
    assert "left out" in caplog.records[-1].getMessage()
    time.sleep(0.21)
    logger.error("later")
    assert caplog.records[-1].getMessage() == "later"


async def test_only_so_many_requests_are_in_hand(model: Path):
    async with serving(model, limits=Limits(requests=0)) as client:
        refused = await client.get("/model")
        assert "in hand" in error_of(refused, 503)
        assert int(refused.headers["retry-after"]) > 0
        assert (await client.get("/healthz", headers=SHOWN)).status_code == 200
        assert error_of(await client.get("/nothing"), 404)


async def test_a_request_of_two_lengths_is_refused_and_nothing_after_it_is_read(model: Path):
    """A proxy before us may believe the other length, and take what follows for somebody else's request."""
    async with listening(model, Limits()) as wire:
        head = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
        reader, _ = await wire.connect(head + b"0\r\n\r\nGET /model HTTP/1.1\r\nhost: localhost\r\n\r\n")
        async with asyncio.timeout(20):
            found = await reader.read()
        assert found.startswith(b"HTTP/1.1 400 ")
        assert found.count(b"HTTP/1.1 ") == 1


async def test_nobody_else_on_the_machine_reads_what_was_sent(model: Path):
    (model / ".serve").mkdir(mode=0o755)  # as an earlier version made it
    async with listening(model, Limits()):
        assert (model / ".serve").stat().st_mode & 0o777 == 0o700
