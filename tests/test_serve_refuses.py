"""What the HTTP server refuses: too much, damaged, hostile, slow, or without the token. It leaves nothing behind."""

from __future__ import annotations

import asyncio
import io
import random
import stat
import struct
import zipfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sandbox
from sandbox import World, pictures
from serving import HERE, SHOWN, SMALL, TOKEN, archive, error_of, pieces, png, serving, uploads, zip64

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from starlette.requests import Request  # noqa: E402

from dualprompt.errors import DualPromptError  # noqa: E402
from dualprompt.inbound.guard import Rules  # noqa: E402
from dualprompt.inbound.limits import Limits  # noqa: E402
from dualprompt.inbound.uploads import Allowance, read  # noqa: E402
from dualprompt.serve.run import rules_for  # noqa: E402

pytestmark = pytest.mark.anyio


LIMITS = Limits(
    predict_bytes=40_000,
    teach_bytes=60_000,
    image_bytes=30_000,
    image_pixels=10_000,
    predict_images=3,
    task_images=4,
    task_classes=2,
    archive_entries=6,
    archive_bytes=500_000,
    archive_ratio=20,
    epochs=9,
)


@pytest.mark.parametrize(
    ("status", "said", "parts"),
    [
        (413, "40000", [("images", ("a.png", bytes(20_000)))] * 3),
        (413, "30000", [("images", ("a.png", bytes(31_000)))]),
        (413, "at most 3", [("images", ("a.png", SMALL))] * 4),
        (413, "pixels", [("images", ("a.png", png(101, 100)))]),
        (413, "pixels", [("images", ("bomb.png", png(14_000, 14_000, "1")))]),
        (413, "100 x 200 pixels", [("images", ("a.tif", pieces(tile=(100, 200))))]),
        (413, "16 x 1000 pixels", [("images", ("a.tif", pieces(rows=1000)))]),
        (422, "not an image", [("images", ("a.png", b"hello"))]),
        (422, "not an image", [("images", ("a.png", b""))]),
        (422, "not an image", [("images", ("a.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"))]),
        (422, "not an image", [("images", ("a.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>"))]),
        (422, "damaged", [("images", ("a.png", SMALL[:50]))]),
        (422, "unknown field", [("picture", ("a.png", SMALL))]),
        (422, "unknown field", [("images", (None, SMALL))]),
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


def loose(noise: int, zeros: int) -> bytes:
    """Bytes that a zip makes smaller, but not too small."""
    return random.Random(0).randbytes(noise) + bytes(zeros)


@pytest.mark.parametrize(
    ("status", "said", "parts", "fields"),
    [
        (413, "60000", [("images", ("a/1.png", bytes(25_000)))] * 3, {}),
        (413, "30000", [("images", ("a/1.png", bytes(31_000)))], {}),
        (413, "at most 4", named(*(f"a/{n}.png" for n in range(5))), {}),
        (413, "classes", named("a/1.png", "b/1.png", "c/1.png"), {}),
        (413, "pixels", [("images", ("a/1.png", png(101, 100)))], {}),
        (413, "pixels", [("images", ("a/1.tif", pieces(tile=(200, 100))))], {}),
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
        (422, "epochs", named("a/1.png"), {"epochs": "9" * 5000}),
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
        (413, "fold", [("archive", ("a.zip", archive({"a/1.png": bytes(20_000)})))], {}),
        (413, "500000", [("archive", ("a.zip", archive({f"a/{n}.txt": loose(8_000, 120_000) for n in range(4)})))], {}),
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


@pytest.mark.parametrize("path", ["/", "/static/app.js"])
async def test_a_range_that_cannot_be_had_is_refused_as_all_else_is(model: Path, path: str):
    async with serving(model) as client:
        whole = await client.get(path)
        for wrong in ("bytes", "bytes=", "bytes=x-y", "lines=0-3", "bytes=5-2", "bytes=-"):
            assert error_of(await client.get(path, headers={"range": wrong}), 400), wrong
        beyond = await client.get(path, headers={"range": f"bytes={len(whole.content)}-"})
        assert error_of(beyond, 416)
        assert beyond.headers["content-range"] == f"bytes */{len(whole.content)}"
        assert beyond.headers["x-content-type-options"] == "nosniff"
        head = await client.head(path, headers={"range": "bytes"})
        assert (head.status_code, head.content, head.headers["content-type"]) == (400, b"", "application/json")
        some = await client.get(path, headers={"range": "bytes=2-5"})
        assert (some.status_code, some.content) == (206, whole.content[2:6])
        assert (await client.get("/metrics")).headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("closed", [False, True])
async def test_what_does_not_exist_is_not_found_whoever_asks(model: Path, closed: bool):
    async with serving(model, rules=Rules(TOKEN, closed=closed)) as client:
        del client.headers["authorization"]
        for method in ("GET", "HEAD", "POST", "DELETE", "PUT", "OPTIONS", "BREW"):
            for path in ("/nothing", "/predict/", "/tasks/", "/jobs/1/2", "/model/../x", "/Predict"):
                reply = await client.request(method, path)
                assert reply.status_code == 404, (method, path)
                assert "location" not in reply.headers
        assert error_of(await client.post("/nothing", headers={"origin": "https://evil.example"}), 403)
        for method, path, allowed in (
            ("POST", "/model", "GET, HEAD"),
            ("PUT", "/predict", "POST"),
            ("POST", "/jobs/1", "DELETE, GET, HEAD"),
            ("GET", "/tasks/1", "DELETE"),
            ("GET", "/tasks", "POST"),
        ):
            reply = await client.request(method, path)
            assert error_of(reply, 405)
            assert reply.headers["allow"] == allowed
        assert (await client.post("/static/app.js")).status_code == 405
        assert (await client.post("/static/nothing")).status_code in (404, 405)


async def test_head_is_get_without_the_body(model: Path):
    async with serving(model) as client:
        for path in ("/", "/healthz", "/model", "/jobs", "/metrics", "/docs", "/openapi.json", "/static/app.js", "/no"):
            got, head = await client.get(path), await client.head(path)
            assert (head.status_code, head.content) == (got.status_code, b""), path
            assert head.headers["content-type"] == got.headers["content-type"]
            assert path == "/metrics" or head.headers["content-length"] == got.headers["content-length"]
        assert error_of(await client.get("/predict"), 405)
        assert (await client.head("/predict")).status_code == 405
        text = (await client.get("/metrics")).text
    assert 'dualprompt_requests_total{method="HEAD",route="/model",status="200"} 1.0' in text
    async with serving(model, rules=Rules(TOKEN, closed=True)) as client:
        assert (await client.head("/model", headers={"authorization": "Bearer wrong"})).status_code == 401


async def test_a_bad_image_among_others_is_an_error_of_its_own(world: World, model: Path):
    good = pictures(world, "ash", "test")[0].read_bytes()
    sent = [
        ("a.png", good),
        ("broken.png", b"GIF89a"),
        ("cut.png", SMALL[:50]),
        ("vast.png", png(101, 101)),
        ("b", good),
    ]
    parts = [("images", each) for each in sent]
    limits = replace(LIMITS, predict_images=9)
    async with serving(model, limits=limits) as client:
        (alone,) = (await client.post("/predict", files=parts[:1])).json()["answers"]
        answers = (await client.post("/predict", files=parts)).json()["answers"]
        assert [answer["path"] for answer in answers] == [name for name, _ in sent]
        assert [answer.get("status") for answer in answers] == [None, 422, 422, 413, None]
        for answer, said in zip(answers[1:4], ("not an image", "damaged", "pixels"), strict=True):
            assert said in answer["error"]
            assert "label" not in answer
        for answer in (answers[0], answers[4]):
            assert answer["label"] == alone["label"]
            assert answer["probability"] == pytest.approx(alone["probability"], abs=1e-5)
        for part, status in zip(parts[1:4], (422, 422, 413), strict=True):
            assert error_of(await client.post("/predict", files=[part]), status)
        assert client.service._held == client.service.decoders.waiting == 0


async def test_thousands_of_parts_leave_others_their_turn():
    head = b'--xx\r\ncontent-disposition: form-data; name="images"; filename="a"\r\n\r\n\r\n'
    body = head * 5000 + b"--xx--\r\n"
    turns = 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    kind = [(b"content-type", b"multipart/form-data; boundary=xx")]
    request = Request({"type": "http", "method": "POST", "headers": kind}, receive)
    beside = asyncio.create_task(others())
    parts = await read(request, Limits(), Allowance(10**9, 60), set(), lambda *_: None)
    beside.cancel()
    assert len(parts) == 5000
    assert turns > len(body) / 20_000


async def test_slow_and_crowding_clients_are_refused(model: Path):
    async def slowly() -> AsyncIterator[bytes]:
        yield b"--xx\r\n"
        await asyncio.sleep(5)

    async def trickling(times: int = 500) -> AsyncIterator[bytes]:
        yield b'--xx\r\ncontent-disposition: form-data; name="images"; filename="a/b.png"\r\n\r\n'
        for _ in range(times):
            yield b"a"
            await asyncio.sleep(0.01)
        yield b"\r\n--xx--\r\n"

    kind = {"content-type": "multipart/form-data; boundary=xx"}
    async with serving(model, limits=Limits(predict_body_seconds=0.1)) as client:
        assert error_of(await client.post("/predict", content=slowly(), headers=kind), 408)
    async with serving(model, limits=Limits(stall_seconds=0.1)) as client:
        assert "too slowly" in error_of(await client.post("/predict", content=slowly(), headers=kind), 408)
        assert "too slowly" in error_of(await client.post("/predict", content=trickling(), headers=kind), 408)
        assert "too slowly" in error_of(await client.post("/tasks", content=trickling(), headers=kind), 408)
        assert client.service._held == 0
        assert uploads(model) == []
    async with serving(model, limits=Limits(stall_seconds=0.05, body_rate=50)) as client:
        assert error_of(await client.post("/predict", content=trickling(20), headers=kind), 422)
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


async def test_a_path_that_is_written_otherwise_needs_the_token_too(model: Path):
    async with serving(model, review_days=1) as client:
        kept = await client.post("/review", files={"images": SMALL}, data={"label": "ash"})
        assert kept.status_code == 201
        shown = client.headers.pop("authorization")
        for path in ("/review", f"/review/{kept.json()['id']}/image", "/jobs/1/findings"):
            ways = (path, f"{path}%0A", f"{path}/", f"/.{path}", f"/%{ord(path[1]):x}{path[2:]}")
            for way in (*ways, f"/static/..{path}", f"/static/%2e%2e{path}"):
                for method in ("GET", "HEAD"):
                    assert (await client.request(method, way)).status_code in (401, 404), way
        assert (await client.get("/review", headers={"authorization": shown})).json()["items"]
    async with serving(model, rules=Rules(TOKEN, closed=True)) as client:
        del client.headers["authorization"]
        for way in ("/model%0A", "/static/../model", "/metrics%0A", "/healthz/../model"):
            assert (await client.get(way)).status_code in (401, 404), way


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


async def test_full_disk_during_an_upload_is_said_and_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    async with serving(model) as client:
        with monkeypatch.context() as patch:
            patch.setattr("dualprompt.inbound.uploads._Assembler._data", full)
            reply = await client.post("/tasks", files=named("a/1.png"))
        assert "disk is full" in error_of(reply, 507)
        assert uploads(model) == []
        assert (await client.post("/predict", files={"images": SMALL})).status_code == 200


def test_limits_are_all_used():
    package = Path(__file__).parents[1] / "src/dualprompt"
    source = "".join(
        path.read_text() for room in ("serve", "hosted", "inbound") for path in (package / room).glob("*.py")
    )
    assert [name for name in vars(Limits()) if f"limits.{name}" not in source] == []
