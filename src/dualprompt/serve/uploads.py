"""Reads multipart requests as they arrive: pictures into memory or straight into a folder, never anywhere else.

Frameworks spool large parts into the system's temporary folder. Pictures that must be deleted after learning should not
lie where we do not look, so that each part goes into a sink of ours, and every bound is checked while bytes arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from dualprompt.serve.limits import Limits, Refusal
from dualprompt.serve.pictures import short

FIELD_BYTES = 10_000
DRAINED_BYTES = 32 * 1024 * 1024

Sink = Callable[[str, str], Path | None]  # (field, file name) → the file to write, or None for memory; may refuse


class Part:
    """One part of a request: a field, or a file with its name."""

    def __init__(self, field: str, filename: str | None, content: bytearray | BinaryIO, path: Path | None) -> None:
        self.field, self.filename, self.content, self.path, self.size = field, filename, content, path, 0

    @property
    def text(self) -> str:
        """What a field says."""
        assert isinstance(self.content, bytearray)
        return self.content.decode("utf-8", "replace")

    @property
    def data(self) -> bytes:
        """The bytes of a part that is kept in memory."""
        assert isinstance(self.content, bytearray)
        return bytes(self.content)


async def read(
    request: Request,
    limits: Limits,
    most: int,
    fields: set[str],
    sink: Sink,
    count: Callable[[int], None] | None = None,
) -> list[Part]:
    """Return the parts of a multipart request of at most `most` bytes.

    `fields` names the parts that may come without a file. `count` hears how many bytes arrived, each time, and may
    refuse. On a refusal the rest of a not too long request is read and dropped, so that its sender sees the answer.
    """
    stream = request.stream()
    try:
        async with asyncio.timeout(limits.body_seconds):
            return await _parse(request, stream, limits, most, fields, sink, count)
    except TimeoutError:
        raise Refusal(408, f"the request took longer than {limits.body_seconds:.0f} s to arrive") from None
    except ClientDisconnect:
        raise Refusal(400, "the request ended early") from None
    except Refusal:
        await _drain(stream)
        raise


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
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise Refusal(415, "send multipart/form-data")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise Refusal(413, f"the request has {length} bytes; at most {most} are taken")
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
            if chunk:
                parser.write(chunk)
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

    def _more_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

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
        name = filename.decode("utf-8", "replace")
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
