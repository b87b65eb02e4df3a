"""Binds a port and serves a model there until it is stopped."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import warnings
from collections.abc import Callable
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from dualprompt.errors import DualPromptError
from dualprompt.inbound.guard import Rules, is_loopback
from dualprompt.inbound.limits import Limits
from dualprompt.inbound.wire import ACCEPTED_AT_ONCE, connection_class, log_sparingly, within_files
from dualprompt.serve.app import create_app
from dualprompt.serve.model import ServedModel
from dualprompt.serve.service import Settings

TOKEN = "DUALPROMPT_TOKEN"
SHORTEST_TOKEN = 16
BACKLOG = 1024


def rules_for(host: str, token: str | None) -> Rules:
    """Return who may ask a server that is bound to `host`; anything but loopback needs a token that people chose.

    Without one, a new token is made for those who change the model; everybody on this machine may ask.
    """
    token = token or os.environ.get(TOKEN) or None
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise DualPromptError(f"the token has {len(token)} characters; give at least {SHORTEST_TOKEN}")
    if token is not None and not (token.isascii() and token.isprintable() and token == token.strip()):
        raise DualPromptError("the token has characters that a header cannot show; give printable ASCII")
    if token is None and not is_loopback(host):
        raise DualPromptError(f"--host {host} lets other machines in: give a token with --token or ${TOKEN}")
    return Rules(token or secrets.token_urlsafe(18), is_loopback(host), closed=token is not None)


def serve(
    path: Path,
    host: str,
    port: int,
    token: str | None,
    device: str,
    started: Callable[[str, str | None], None],
    largest_batch: int = 16,
    limits: Limits | None = None,
    waiting: Callable[[str], None] = lambda text: None,
) -> None:
    """Serve the saved model at `path` until a signal ends it.

    `started` receives its address, and the token it made; `waiting` is called when somebody else still holds the model.
    """
    rules, limits = rules_for(host, token), within_files(limits or Limits())
    # What clients send wrong is told to them; it must not fill our log too.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="PIL")
    try:
        bound = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise DualPromptError(
            f"cannot bind {host}:{port} ({error.strerror}); choose another --port or --host"
        ) from None
    # asyncio does so itself only for sockets that were made with the protocol's number; else an answer's second packet
    # waits 40 ms for the client to acknowledge the first.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with bound:
        model = ServedModel(path, device, waiting)
        app = create_app(model, Settings(rules, limits, largest_batch))
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{bound.getsockname()[1]}"
        server = server_of(app, limits)
        server.started_at = lambda: started(address, None if rules.closed else rules.token)
        server.run(sockets=[bound])


def server_of(app: FastAPI, limits: Limits) -> Server:
    """Return a server that is ready to run an application on bound sockets."""
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http=connection_class(limits),
        ws="none",
        h11_max_incomplete_event_size=limits.header_bytes,
        timeout_keep_alive=limits.idle_seconds,
        timeout_graceful_shutdown=5,
        backlog=ACCEPTED_AT_ONCE,  # asyncio accepts as many at once as may wait to be accepted
    )
    log_sparingly()
    return Server(config)


class Server(uvicorn.Server):
    """Says when it answers."""

    started_at: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(BACKLOG)  # to the system alone; asyncio still accepts few at once
        if self.started:
            self.started_at()
