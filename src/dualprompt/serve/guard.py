"""Who may ask: checked before anything else, and what every answer carries."""

from __future__ import annotations

import hmac
import ipaddress
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualprompt.serve.limits import Refusal
from dualprompt.serve.metrics import Metrics

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
OPEN = ("/", "/healthz", "/docs", "/openapi.json")  # the page and its files say nothing of the model


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Rules:
    """Whoever changes the model must show `token`; if `closed`, whoever asks for anything.

    `local`: we are bound to a loopback address.
    """

    token: str
    local: bool = True
    closed: bool = False

    def check(self, method: str, path: str, headers: Headers) -> None:
        """Refuse a request from whom it must not be taken."""
        host = headers.get("host", "")
        if self.local and not is_loopback(_hostname(host)):
            # A web page whose name was made to point to this machine asks with its own name.
            raise Refusal(421, "this server answers only to localhost")
        origin = headers.get("origin")
        foreign = origin is not None and urlsplit(origin).netloc != host
        if method not in ("GET", "HEAD") and (foreign or headers.get("sec-fetch-site") in ("cross-site", "same-site")):
            raise Refusal(403, "requests from other web pages are not taken")
        changes = method not in ("GET", "HEAD", "OPTIONS") and path != "/predict"
        if not changes and (not self.closed or path in OPEN or path.startswith("/static/")):
            return
        kind, _, shown = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), self.token.encode()):
            text = "this needs the server's token, as the header 'Authorization: Bearer TOKEN'"
            raise Refusal(401, text, {"WWW-Authenticate": "Bearer"})


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class Guard:
    """Applies the rules, adds headers to every answer, and counts."""

    def __init__(self, app: ASGIApp, rules: Rules, metrics: Metrics) -> None:
        self.app, self.rules, self.metrics = app, rules, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-cache" if scope["path"].startswith("/static/") else "no-store")
            await send(message)

        try:
            self.rules.check(scope["method"], scope["path"], Headers(scope=scope))
        except (Refusal, ValueError) as refusal:  # ValueError: an origin that is no address
            await answer_refusal(refusal)(scope, receive, sending)
        else:
            await self.app(scope, receive, sending)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "DELETE", "OPTIONS") else "other"
            self.metrics.requests.labels(method, route, status).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - began)


def answer_refusal(refusal: Exception) -> JSONResponse:
    """Return the answer that carries a refusal."""
    if not isinstance(refusal, Refusal):
        refusal = Refusal(400, "a header of the request is malformed")
    return JSONResponse({"error": refusal.message}, refusal.status, refusal.headers)
