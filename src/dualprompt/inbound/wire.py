"""Connections, below HTTP: who says nothing, half a sentence, or does not listen, does not keep others out.

uvicorn closes connections that are silent between two requests, but waits for ever for the first, for the rest of one
that has begun, and for a client to read its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from dualprompt.errors import DualPromptError
from dualprompt.inbound.limits import Limits

READ_BYTES = 32 * 1024  # of one connection at a time, so that others have their turn
ACCEPTED_AT_ONCE = 16
SPARE_FILES = 64  # for what arrives before room was made, uploads, the model, and processes that learn
LEAST_CONNECTIONS = 8


def within_files(limits: Limits) -> Limits:
    """Return limits that keep connections below the number of files that this process may open."""
    try:
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        taken = len(list(Path("/dev/fd").iterdir()))
    except (ImportError, OSError):
        return limits
    if most in (-1, resource.RLIM_INFINITY):
        return limits
    connections = min(limits.connections, most - taken - SPARE_FILES)
    if connections < LEAST_CONNECTIONS:
        least = taken + SPARE_FILES + LEAST_CONNECTIONS
        raise DualPromptError(f"only {most} files may be open at a time; allow at least {least} with `ulimit -n`")
    # Fewer requests in hand than connections: there is always one that waits for its client, and can make room.
    return replace(limits, connections=connections, requests=min(limits.requests, connections // 2))


class Connection(H11Protocol):
    """A connection that must say what it asks in time, and take its answer in time."""

    limits = Limits()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._quiet_since = self.loop.time()
        self._patience: asyncio.TimerHandle | None = None  # until it has said what it asks
        self._taking: asyncio.TimerHandle | None = None  # until it has taken what we said

    @property
    def asks_nothing(self) -> bool:
        """Whether we wait for a request, or for the rest of its head."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def waits_for_client(self) -> bool:
        """Whether we wait for the client: for a request, or for the rest of one."""
        return self.asks_nothing or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; if this is one too many, close the one whose client has been silent longest."""
        with contextlib.suppress(AttributeError):
            transport.max_size = READ_BYTES  # pyright: ignore[reportAttributeAccessIssue]
        super().connection_made(transport)
        self._wait_for_request()
        if len(self.connections) > self.limits.connections:
            others = [other for other in self.connections if isinstance(other, Connection) and other.waits_for_client]
            min(others, key=lambda other: other._quiet_since, default=self).abort()

    def abort(self) -> None:
        """Close at once, whatever was not sent."""
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of an unfinished request, or beyond what was answered, do not make us wait longer."""
        self._quiet_since = self.loop.time()
        super().data_received(data)
        if self.asks_nothing:
            self._wait_for_request()
        else:
            self._patience = _cancelled(self._patience)

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the client to take the answer."""
        self._quiet_since = self.loop.time()
        super().on_response_complete()
        if self.transport.is_closing():
            self._wait_for_reader()

    def timeout_keep_alive_handler(self) -> None:
        """Close, but do not wait for ever until the last answer was taken."""
        super().timeout_keep_alive_handler()
        self._wait_for_reader()

    def pause_writing(self) -> None:
        """Stop writing, but not for ever."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        self._taking = _cancelled(self._taking)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._patience, self._taking = _cancelled(self._patience), _cancelled(self._taking)
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(self.limits.header_seconds, self.abort)

    def _wait_for_reader(self) -> None:
        if self._taking is None:
            self._taking = self.loop.call_later(self.limits.reading_seconds, self.abort)


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def connection_class(limits: Limits) -> type[Connection]:
    """Return the class of connections under these limits."""
    return type("LimitedConnection", (Connection,), {"limits": limits})


class Sparing(logging.Filter):
    """Lets so many lines of a logger through a minute; what clients do must not fill a disk."""

    def __init__(self, lines: int = 20, seconds: float = 60.0) -> None:
        super().__init__()
        self.lines, self.seconds, self._since, self._seen = lines, seconds, time.monotonic(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is let through; the last one says that more were left out."""
        now = time.monotonic()
        if now - self._since > self.seconds:
            self._since, self._seen = now, 0
        self._seen += 1
        if self._seen == self.lines:
            record.msg = f"{record.getMessage()} (further lines are left out for up to {self.seconds:.0f} s)"
            record.args = ()
        return self._seen <= self.lines


def log_sparingly() -> None:
    """Limit what the loggers of this process write that clients can provoke."""
    for name in ("asyncio", "uvicorn.error", "dualprompt.serve"):
        logger = logging.getLogger(name)
        if not any(isinstance(each, Sparing) for each in logger.filters):
            logger.addFilter(Sparing())
