"""A client of `dualprompt serve`, of the standard library alone.

client = Client("http://127.0.0.1:8000", token="…")
print(client.predict("cat.jpg")["label"])
job = client.teach({"robin": ["a.jpg", "b.jpg"], "wren": ["c.jpg"]}, name="Birds")
client.wait(job)
"""

from __future__ import annotations

import http.client
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from dualprompt.errors import DualPromptError

Image = str | Path | bytes
POLL_SECONDS = 0.5
MOST_BYTES = 64 * 2**20  # of an answer
Found = TypeVar("Found")


class RefusedError(DualPromptError):
    """What the server answered instead: one line, and its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Asks one server; `token` is needed for whatever changes its model, `seconds` is how long an answer may take."""

    def __init__(self, url: str, token: str | None = None, seconds: float = 60.0) -> None:
        wrong = f"'{url}' is no address of a server; give one as http://127.0.0.1:8000"
        try:
            place = urlsplit(url)
            right = place.scheme in ("http", "https") and place.hostname and place.port != 0
        except ValueError:  # a port that is none
            raise DualPromptError(wrong) from None
        if not right:
            raise DualPromptError(wrong)
        if token is not None and not (token.isascii() and token.isprintable()):
            raise DualPromptError("the token has characters that a header cannot show; give printable ASCII")
        self.url, self.token, self.seconds = url.rstrip("/"), token, seconds
        self._place = place

    def predict(self, image: Image, top_k: int = 5, threshold: float | None = None) -> dict[str, Any]:
        """Return what the model says of one image: its bytes, or a file's path."""
        query = {"top_k": top_k} | ({} if threshold is None else {"threshold": threshold})
        reply = self._ask("POST", f"/predict?{urlencode(query)}", _content(image), "image/*")
        return self._found(lambda: reply["answers"][0])

    def predict_many(self, images: Sequence[Image], top_k: int = 5) -> list[dict[str, Any]]:
        """Return what the model says of each image; one that cannot be read has `error` and `status` instead."""
        parts = [("images", f"{n}-{_name(image)}", _content(image)) for n, image in enumerate(images)]
        reply = self._send(f"/predict?top_k={top_k}", parts)
        return self._found(lambda: reply["answers"])

    def teach(
        self, classes: Mapping[str, Iterable[Image]], name: str | None = None, *, again: bool = False
    ) -> dict[str, Any]:
        """Send images of new classes to be learned; return the job, for `wait`."""
        if deeper := next((label for label in classes if "/" in label), None):
            raise DualPromptError(
                f"class '{deeper}' cannot be sent: what follows a slash would be lost; name it without"
            )
        parts: list[tuple[str, str | None, bytes]] = [
            ("images", f"{label}/{n}-{_name(image)}", _content(image))
            for label, images in classes.items()
            for n, image in enumerate(images)
        ]
        fields = {"name": name, "again": "true" if again else None}
        parts += [(key, None, value.encode()) for key, value in fields.items() if value is not None]
        return self._send("/tasks", parts)

    def job(self, number: int) -> dict[str, Any]:
        """Return how far a job is."""
        return self._ask("GET", f"/jobs/{number}")

    def wait(
        self, job: Mapping[str, Any], seconds: float = 3600.0, seen: Callable[[dict[str, Any]], None] = lambda job: None
    ) -> dict[str, Any]:
        """Return a job when it is done; `seen` gets it each time it is looked at. One that failed is an error."""
        until = time.monotonic() + seconds
        while True:
            found = self.job(job["id"])
            state, error = self._found(lambda found=found: (found["state"], found["error"]))
            seen(found)
            if state == "failed":
                raise DualPromptError(f"job {job['id']} failed: {error}")
            if state == "done":
                return found
            if time.monotonic() > until:
                raise DualPromptError(f"job {job['id']} is not done after {seconds:.0f} s; it goes on at the server")
            time.sleep(POLL_SECONDS)

    def forget(self, *, task: int | None = None, label: str | None = None, purge: bool = False) -> dict[str, Any]:
        """Make the model forget a task, by its id, or a class; with `purge`, in all its versions."""
        if (task is None) == (label is None):
            raise DualPromptError("say either which task or which class (label) is to be forgotten")
        path = f"/tasks/{task}" if label is None else f"/classes/{quote(label, safe='')}"
        return self._ask("DELETE", f"{path}?purge=true" if purge else path)

    def info(self) -> dict[str, Any]:
        """Return what the model knows."""
        return self._ask("GET", "/model")

    def _found(self, look: Callable[[], Found]) -> Found:
        """Return a part of an answer; it may come from anything that listens there."""
        try:
            return look()
        except (LookupError, TypeError):
            raise DualPromptError(f"{self.url} did not answer as a dualprompt server does; is it one?") from None

    def _send(self, path: str, parts: Sequence[tuple[str, str | None, bytes]]) -> Any:
        """Post a form of fields and files."""
        boundary = secrets.token_hex(16)
        lines: list[bytes] = []
        for field, filename, content in parts:
            named = "" if filename is None else f'; filename="{_quoted(filename)}"'
            head = f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"{named}\r\n\r\n'
            lines += [head.encode(errors="backslashreplace"), content, b"\r\n"]
        body = b"".join([*lines, f"--{boundary}--\r\n".encode()])
        return self._ask("POST", path, body, f"multipart/form-data; boundary={boundary}")

    def _ask(self, method: str, path: str, body: bytes | None = None, kind: str | None = None) -> Any:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        headers |= {"Content-Type": kind} if kind else {}
        secure = self._place.scheme == "https"
        made = (http.client.HTTPSConnection if secure else http.client.HTTPConnection)(
            self._place.hostname or "", self._place.port, timeout=self.seconds
        )
        try:
            made.request(method, f"{self._place.path.rstrip('/')}{path}", body, headers)
            reply = made.getresponse()
            status, content = reply.status, reply.read(MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                raise DualPromptError(
                    f"{self.url} answered with more than {MOST_BYTES:,} bytes; is it a dualprompt server?"
                )
        except (OSError, http.client.HTTPException) as error:
            raise DualPromptError(f"{self.url} does not answer ({error or type(error).__name__})") from None
        finally:
            made.close()
        return _read(self.url, status, content)


def _read(url: str, status: int, content: bytes) -> Any:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise RefusedError(
            f"{url} answered with status {status} and no JSON; is it a dualprompt server?", status
        ) from None
    if status >= 400:
        said = found.get("error") if isinstance(found, dict) else None
        raise RefusedError(str(said or f"{url} answered with status {status}"), status)
    return found


def _content(image: Image) -> bytes:
    if isinstance(image, bytes):
        return image
    try:
        return Path(image).read_bytes()
    except OSError as error:
        raise DualPromptError(f"{image} cannot be read ({error.strerror})") from None


def _name(image: Image) -> str:
    return "image" if isinstance(image, bytes) else Path(image).name


def _quoted(name: str) -> str:
    """Return a file's name as browsers write it into a form."""
    return name.replace("\\", "_").replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
