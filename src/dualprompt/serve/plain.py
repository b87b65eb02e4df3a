"""What Starlette refuses in plain text by itself, as a malformed Range, is told as every other error: in JSON."""

from __future__ import annotations

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualprompt.inbound.guard import answer_refusal
from dualprompt.inbound.limits import Refusal


class PlainRefusals:
    """Middleware that turns an error in plain text into the object that clients expect."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        refused: Message | None = None
        said = b""

        async def sending(message: Message) -> None:
            nonlocal refused, said
            if _is_plain_error(message):
                refused = message
            elif refused is None:
                await send(message)
            else:
                said += message.get("body", b"")
                if not message.get("more_body"):
                    await _refusal(refused, said)(scope, receive, send)

        await self.app(scope, receive, sending)


def _is_plain_error(message: Message) -> bool:
    if message["type"] != "http.response.start" or message["status"] < HTTPStatus.BAD_REQUEST:
        return False
    return Headers(raw=message["headers"]).get("content-type", "").startswith("text/plain")


def _refusal(start: Message, said: bytes) -> ASGIApp:
    """Return the answer in JSON, with the headers that are not of the text."""
    headers = Headers(raw=start["headers"]).items()
    kept = {name: value for name, value in headers if name not in ("content-type", "content-length")}
    text = said.decode(errors="replace").strip() or HTTPStatus(start["status"]).phrase
    return answer_refusal(Refusal(start["status"], text, kept))
