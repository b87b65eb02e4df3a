"""Reads multipart requests as they arrive: pictures into memory or straight into a folder, never anywhere else.

Frameworks spool large parts into the system's temporary folder. Pictures that must be deleted after learning should not
lie where we do not look, so that each part goes into a sink of ours, and every bound is checked while bytes arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import BaseModel, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from dualprompt.inbound.limits import Limits, Refusal
from dualprompt.inbound.pictures import short

FIELD_BYTES = 10_000
PART_HEADERS, HEADER_BYTES = 16, 8 * 1024
DRAINED_BYTES = 32 * 1024 * 1024
PIECE_BYTES = 16 * 1024  # parsed at a time, between which others have their turn: it may begin hundreds of parts

Wanted = TypeVar("Wanted", bound=BaseModel)
Sink = Callable[[str, str], Path | None]  # (field, file name) → the file to write, or None for memory; may refuse


@dataclass(frozen=True)
class Allowance:
    """What a request may take: so many bytes, in so many seconds."""

    bytes: int
    seconds: float


class Part:
    """One part of a request: a field, or a file with its name."""

    def __init__(self, field: str, filename: str | None, content: bytearray | BinaryIO, path: Path | None) -> None:
        self.field, self.filename, self.content, self.path, self.size = field, filename, content, path, 0

    @property
    def text(self) -> str:
        """What a field says."""
        assert isinstance(self.content, bytearray)
        return self.content.decode("utf-8", "replace")

    def take(self) -> bytes:
        """Return the bytes of a part that is kept in memory, which it holds no longer."""
        assert isinstance(self.content, bytearray)
        taken = bytes(self.content)
        self.content.clear()
        return taken


async def read(
    request: Request,
    limits: Limits,
    allowed: Allowance,
    fields: set[str],
    sink: Sink,
    count: Callable[[int], None] | None = None,
) -> list[Part]:
    """Return the parts of a multipart request that keeps to what is allowed.

    `fields` names the parts that may come without a file; where none may, the body may also be one image. `count`
    receives how many bytes arrived, each time, and may refuse. On a refusal the rest of a not too long request is read
    and dropped, so that its sender sees the answer.
    """
    stream = request.stream()
    try:
        async with asyncio.timeout(allowed.seconds):
            return await _parse(request, _flowing(stream, limits), limits, allowed.bytes, fields, sink, count)
    except TimeoutError:
        raise Refusal(408, f"the request took longer than {allowed.seconds:.0f} s to arrive") from None
    except ClientDisconnect:
        raise Refusal(400, "the request ended early") from None
    except Refusal as refusal:
        if refusal.status != 408:  # who is slow has had its time
            await _drain(stream)
        raise


async def read_json(request: Request, limits: Limits, kind: type[Wanted]) -> Wanted:
    """Return what a JSON request says, which must be of a kind."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal(415, "send application/json")
    content = bytearray()
    try:
        async with asyncio.timeout(limits.predict_body_seconds):
            async for chunk in _flowing(request.stream(), limits):
                content += chunk
                if len(content) > limits.json_bytes:
                    raise Refusal(413, f"the request has more than {limits.json_bytes} bytes")
        return kind.model_validate_json(bytes(content))
    except TimeoutError:
        raise Refusal(408, f"the request took longer than {limits.predict_body_seconds:.0f} s to arrive") from None
    except ClientDisconnect:
        raise Refusal(400, "the request ended early") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Refusal(422, f"{where}: {first['msg']}" if where else str(first["msg"])) from None


async def _flowing(stream: AsyncIterator[bytes], limits: Limits) -> AsyncIterator[bytes]:
    """Yield what arrives; refuse a sender who stalls, or who trickles: what it has sent takes our memory meanwhile."""
    now = asyncio.get_running_loop().time
    slow = Refusal(408, f"the request came too slowly; at least {limits.body_rate} bytes a second must arrive")
    since, arrived = now(), 0
    while True:
        try:
            async with asyncio.timeout(limits.stall_seconds):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise slow from None
        if chunk is None:
            return
        arrived += len(chunk)
        if (passed := now() - since) > limits.stall_seconds:
            if arrived < limits.body_rate * passed:
                raise slow
            since, arrived = now(), 0
        yield chunk


async def _whole(
    stream: AsyncIterator[bytes], limits: Limits, most: int, sink: Sink, count: Callable[[int], None] | None
) -> list[Part]:
    """Return the one image that is a request's body."""
    sink("images", "")
    part = Part("images", "", bytearray(), None)
    async for chunk in stream:
        part.size += len(chunk)
        if part.size > min(most, limits.image_bytes):
            raise Refusal(413, f"the image has more than {min(most, limits.image_bytes)} bytes")
        if count:
            count(len(chunk))
        assert isinstance(part.content, bytearray)
        part.content += chunk
    if not part.size:
        raise Refusal(422, "the request has no body; send an image")
    return [part]


async def _parse(
    request: Request,
    stream: AsyncIterator[bytes],
    limits: Limits,
    most: int,
    fields: set[str],
    sink: Sink,
    count: Callable[[int], None] | None,
) -> list[Part]:
    kind, options = parse_options_header(request.headers.get("content-type"))
    alone = kind.startswith(b"image/") and not fields
    if not alone and (kind != b"multipart/form-data" or not options.get(b"boundary")):
        raise Refusal(415, "send multipart/form-data" + ("" if fields else ", or one image with its own type, image/*"))
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise Refusal(413, f"the request has {length} bytes; at most {most} are taken")
    if alone:
        return await _whole(stream, limits, most, sink, count)
    assembler = _Assembler(limits, fields, sink)
    try:
        parser = MultipartParser(options[b"boundary"], assembler.callbacks())
        total = 0
        async for chunk in stream:
            total += len(chunk)
            if total > most:
                raise Refusal(413, f"the request has more than {most} bytes")
            if count:
                count(len(chunk))
            for start in range(0, len(chunk), PIECE_BYTES):
                parser.write(chunk[start : start + PIECE_BYTES])
                await asyncio.sleep(0)
        parser.finalize()
    except FormParserError as error:
        raise Refusal(400, f"the multipart request is malformed ({error})") from None
    finally:
        assembler.close()
    if not assembler.ended:
        raise Refusal(400, "the multipart request ends early")
    return assembler.parts


async def _drain(stream: AsyncIterator[bytes]) -> None:
    left = DRAINED_BYTES
    try:
        async with asyncio.timeout(5):
            async for chunk in stream:
                left -= len(chunk)
                if left < 0:
                    return
    except (TimeoutError, ClientDisconnect, RuntimeError):  # RuntimeError: the stream was at its end
        return


class _Assembler:
    """Puts parts together from what the parser calls."""

    def __init__(self, limits: Limits, fields: set[str], sink: Sink) -> None:
        self.limits, self.fields, self.sink = limits, fields, sink
        self.parts: list[Part] = []
        self.ended = False
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""

    def callbacks(self) -> Any:
        """Return the parser's callbacks."""
        return {
            "on_part_begin": self._headers.clear,
            "on_header_field": self._field,
            "on_header_value": self._more_value,
            "on_header_end": self._header,
            "on_headers_finished": self._begin,
            "on_part_data": self._data,
            "on_part_end": self._finish,
            "on_end": self._end,
        }

    def close(self) -> None:
        """Close the file of an unfinished part."""
        if self.parts:
            self._finish()

    def _field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]
        self._check_header()

    def _more_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._name) + len(self._value) > HEADER_BYTES:
            raise Refusal(400, f"a header of a part of the request is longer than {HEADER_BYTES} bytes")

    def _header(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""
        if len(self._headers) > PART_HEADERS:
            raise Refusal(400, f"a part of the request has more than {PART_HEADERS} headers")

    def _begin(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        field = options.get(b"name", b"").decode("utf-8", "replace")
        filename = options.get(b"filename")
        if filename is None and field not in self.fields:
            hint = "; send it as a file" if field else ""
            raise Refusal(422, f"unknown field '{field[:50]}'{hint}")
        if filename is None:
            if any(part.field == field for part in self.parts):
                raise Refusal(422, f"the field '{field}' came twice")
            self.parts.append(Part(field, None, bytearray(), None))
            return
        name = _unescaped(filename.decode("utf-8", "replace"))
        path = self.sink(field, name)
        self.parts.append(Part(field, name, path.open("wb") if path else bytearray(), path))

    def _data(self, data: bytes, start: int, end: int) -> None:
        part = self.parts[-1]
        part.size += end - start
        if part.filename is None and part.size > FIELD_BYTES:
            raise Refusal(413, f"the field '{part.field}' is longer than {FIELD_BYTES} bytes")
        if part.field == "images" and part.size > self.limits.image_bytes:
            name = short(part.filename or "")
            raise Refusal(413, f"the image '{name}' has more than {self.limits.image_bytes} bytes")
        if isinstance(part.content, bytearray):
            part.content += data[start:end]
        else:
            part.content.write(data[start:end])

    def _finish(self) -> None:
        part = self.parts[-1]
        if not isinstance(part.content, bytearray):
            part.content.close()

    def _end(self) -> None:
        self.ended = True


def _unescaped(name: str) -> str:
    """Return a file's name as it was before browsers, curl and our client made it fit into a header."""
    return name.replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")
