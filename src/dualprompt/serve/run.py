"""Binds a port and serves a model there until it is stopped."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from dualprompt.errors import DualPromptError
from dualprompt.hosted.engine import TORCH, Engine
from dualprompt.hosted.model import ServedModel
from dualprompt.inbound.guard import Rules, is_loopback
from dualprompt.inbound.limits import Limits
from dualprompt.inbound.wire import ACCEPTED_AT_ONCE, connection_class, log_sparingly, within_files
from dualprompt.learner import ContinualLearner
from dualprompt.model import saved
from dualprompt.serve.app import create_app
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


@dataclass(frozen=True)
class Options:
    """How a model is served: where, whom, and by what.

    `token` is what clients show (None: one is made). `review_days` is how long pictures to look at are kept (None: none
    is). `new` are the arguments of `ContinualLearner` for a model that
    does not exist yet. `limits` are those of one machine unless they are given.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    device: str = "auto"
    largest_batch: int = 16
    engine: Engine = TORCH
    review_days: float | None = None
    new: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)


class Told:
    """What whoever starts a server is told; by default, nothing."""

    def waiting(self, text: str) -> None:
        """Somebody else still holds the model."""

    def remark(self, text: str) -> None:
        """Something that is good to know."""

    def started(self, address: str, token: str | None) -> None:
        """It answers at an address; the token is the one that it made, if it made one."""


def serve(path: Path, options: Options, told: Told) -> None:
    """Serve the saved model at `path` until a signal ends it; make it if there is none."""
    rules, limits = rules_for(options.host, options.token), within_files(options.limits)
    # What clients send wrong is told to them; it must not fill our log too.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="PIL")
    with bound_to(options.host, options.port) as bound:
        make_new(path, options, told)
        model = ServedModel(path, options.device, told.waiting, options.engine)
        if agreement := model.accelerate():
            told.remark(f"{options.engine.words}: {agreement.sentence()}")
        app = create_app(model, Settings(rules, limits, options.largest_batch, review_days=options.review_days))
        shown = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http://{shown}:{bound.getsockname()[1]}"
        server = server_of(app, limits)
        server.started_at = lambda: told.started(address, None if rules.closed else rules.token)
        server.run(sockets=[bound])


def bound_to(host: str, port: int) -> socket.socket:
    """Return a socket at an address, or say why there is none."""
    try:
        bound = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise DualPromptError(
            f"cannot bind {host}:{port} ({error.strerror}); choose another --port or --host"
        ) from None
    # asyncio does so itself only for sockets that were made with the protocol's number; else an answer's second packet
    # waits 40 ms for the client to acknowledge the first.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def make_new(path: Path, options: Options, told: Told) -> None:
    """Make a model that knows nothing, where there is none yet."""
    saved.refuse_other(path)
    if saved.is_model(path):
        if options.new:
            option = next(iter(options.new)).replace("_", "-")
            raise DualPromptError(f"{path} exists: --{option} is for a new model; leave it out, or name another")
        return
    ContinualLearner(device=options.device, **options.new).save(path)
    told.remark(f"{path} is new and knows nothing yet: teach it on its page")


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
