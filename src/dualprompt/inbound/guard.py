"""Who may ask for what: checked before anything of a request is read, and what every answer carries."""

from __future__ import annotations

import hmac
import ipaddress
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualprompt.inbound.limits import Refusal, unavailable
from dualprompt.inbound.pictures import short

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
HEALTH = "/healthz"
# Routes by the paths that they were made with. The path of a request may be written in ways that we do not foresee,
# as "/review%0A", which the router takes for /review; so what it asks is told by the route that will answer.
ASKING = ("/predict", "/explain")  # with a body, but nothing is changed
KEPT = re.compile(r"/review(/.*)?|/jobs/\{job\}/findings")  # people's pictures, and their names for them
Observe = Callable[[str, str, int, float], None]  # method, route, status, seconds
STATIC = "/static"  # takes no method that changes anything
OPEN = ("/", HEALTH, "/docs", "/openapi.json")  # the page and its files say nothing of the model


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

    def check_origin(self, method: str, headers: Headers) -> None:
        """Refuse a request that another web page had a browser send."""
        host = headers.get("host", "")
        if self.local and not is_loopback(_hostname(host)):
            # A web page whose name was made to point to this machine asks with its own name.
            raise Refusal(421, "this server answers only to localhost")
        origin = headers.get("origin")
        foreign = origin is not None and urlsplit(origin).netloc != host
        if method not in ("GET", "HEAD") and (foreign or headers.get("sec-fetch-site") in ("cross-site", "same-site")):
            raise Refusal(403, "requests from other web pages are not taken")

    def check_token(self, method: str, route: str, headers: Headers) -> None:
        """Refuse a request of a route that needs the token and does not show it."""
        asks = method in ("GET", "HEAD") or route in ASKING
        changes = not asks or not route or KEPT.fullmatch(route) is not None
        if route == STATIC or (not changes and (not self.closed or route in OPEN)):
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


def check_route(app: Starlette, scope: Scope) -> str:
    """Return the route that will answer, by its own path; refuse what is asked of nothing.

    All may know what there is, for the schema tells it.
    """
    found = [(route, route.matches(scope)[0]) for route in app.routes]
    if taken := next((route for route, match in found if match is Match.FULL), None):
        return getattr(taken, "path", "")
    allowed = {method for route, match in found if match is Match.PARTIAL for method in getattr(route, "methods", ())}
    if not allowed:
        raise Refusal(404, f"there is nothing at {short(scope['path'])}")
    allowed |= {"HEAD"} if "GET" in allowed else set()
    methods = ", ".join(sorted(allowed))
    raise Refusal(405, f"{short(scope['path'])} takes only {methods}", {"Allow": methods})


class Guard:
    """Applies the rules, adds headers to every answer, answers HEAD as GET without the body.

    `observe` is told of every request that was answered. At most `most` requests are in hand at a time. One whose body
    is still on its way is not: there, the client works.
    """

    def __init__(self, app: ASGIApp, rules: Rules, observe: Observe, most: int) -> None:
        self.app, self.rules, self.observe, self.most = app, rules, observe, most
        self.in_hand = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, mine = time.perf_counter(), 500, 0
        method, without_body = scope["method"], scope["method"] == "HEAD"
        scope = {**scope, "method": "GET"} if without_body else scope

        def take_on() -> None:
            nonlocal mine
            if self.in_hand >= self.most and scope["path"] != HEALTH:
                raise unavailable("the server has enough requests in hand; try again soon")
            mine += 1
            self.in_hand += 1

        async def receiving() -> Message:
            message = await receive()
            if not mine and message["type"] == "http.request" and not message.get("more_body"):
                take_on()
            return message

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-cache" if scope["path"].startswith("/static/") else "no-store")
            elif without_body:
                message = {**message, "body": b""}
            await send(message)

        try:
            self._check(scope)
            if scope["method"] != "POST":
                take_on()
        except (Refusal, ValueError) as refusal:  # ValueError: an origin that is no address
            await answer_refusal(refusal)(scope, receive, sending)
        else:
            await self.app(scope, receiving, sending)
        finally:
            self.in_hand -= mine
            route = getattr(scope.get("route"), "path", "other")
            method = method if method in ("GET", "HEAD", "POST", "DELETE", "OPTIONS") else "other"
            self.observe(method, route, status, time.perf_counter() - began)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy before us may believe the one where we believe the other: what follows would be another's request.
            raise Refusal(400, "a request has one length", {"Connection": "close"})
        self.rules.check_origin(scope["method"], headers)
        route = check_route(scope["app"], scope)
        self.rules.check_token(scope["method"], route, headers)


def answer_refusal(refusal: Exception) -> JSONResponse:
    """Return the answer that carries a refusal."""
    if not isinstance(refusal, Refusal):
        refusal = Refusal(400, "a header of the request is malformed")
    return JSONResponse({"error": refusal.message}, refusal.status, refusal.headers)
