"""What tests of the server share: the application in this process, pictures to send, and waiting."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import struct
import zipfile
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sandbox import World, pictures

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from dualprompt.hosted.model import ServedModel  # noqa: E402
from dualprompt.inbound.guard import Rules  # noqa: E402
from dualprompt.inbound.limits import Limits  # noqa: E402
from dualprompt.serve.app import create_app  # noqa: E402
from dualprompt.serve.run import Server, server_of  # noqa: E402
from dualprompt.serve.service import Service, Settings  # noqa: E402

TOKEN = "a token of twenty-six letters"
SHOWN = {"authorization": f"Bearer {TOKEN}"}
HERE = "http://127.0.0.1"


def png(width: int = 20, height: int = 20, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG")
    return file.getvalue()


def pieces(side: int = 16, tile: tuple[int, int] | None = None, rows: int = 0) -> bytes:
    """A small grey TIFF, cut into one tile or strip that may be far larger than itself."""
    size = tile[0] * tile[1] if tile else side * rows
    content = zlib.compress(bytes(size), 9)
    entries = {256: side, 257: side, 258: 8, 259: 8, 262: 1, 277: 1}
    start, length = (324, 325) if tile else (273, 279)
    entries |= {322: tile[0], 323: tile[1]} if tile else {278: rows}
    entries |= {start: 8 + 2 + 12 * (len(entries) + 2) + 4, length: len(content)}
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(entries.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + table + bytes(4) + content


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


class Wire:
    """A server on a port of this machine, and ways to speak to it that no polite client has."""

    def __init__(self, server: Server, service: Service, port: int) -> None:
        self.server, self.service, self.port = server, service, port
        self.opened: list[asyncio.StreamWriter] = []

    async def connect(self, said: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection and say something."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.opened.append(writer)
        writer.write(said)
        return reader, writer

    async def status(self, path: str) -> int:
        """Ask for something in a connection of its own; return the answer's status."""
        reader, _ = await self.connect(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        async with asyncio.timeout(20):
            return int((await reader.readline()).split()[1])

    async def until(self, done: Any, seconds: float = 20) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(seconds):
            while not done():
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def listening(model: Path, limits: Limits) -> AsyncIterator[Wire]:
    """Run the server in this process, on a port."""
    app = create_app(ServedModel(model, "cpu"), Settings(Rules(TOKEN), limits))
    server = server_of(app, limits)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        running = asyncio.create_task(server.serve(sockets=[bound]))
        wire = Wire(server, app.state.service, bound.getsockname()[1])
        try:
            await wire.until(lambda: server.started or running.done())
            yield wire
        finally:
            for writer in wire.opened:
                writer.transport.abort()
            server.should_exit = True
            await running


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


def zip64(content: bytes, entries: int | None = None, record: bytes = b"PK\x06\x06") -> bytes:
    """An archive whose table of contents is told of as in archives of more than 4 GB, as some programs always do."""
    count, size, start = struct.unpack("<HII", content[-12:-2])
    told = struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, entries or count, size, start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, len(content) - 22, 1)
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return content[:-22] + record + told + locator + end


SMALL = png()
