"""One of several processes that answer from one model folder, which somebody else teaches.

    python replica.py MODEL PORT

It never writes and holds no lock. It looks at `model.json` once a second, and answers with the new model when that is
replaced; a reader sees the old model or the new, never half of either. POST an image; GET tells version and classes.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dualprompt import ContinualLearner
from dualprompt.errors import DualPromptError
from dualprompt.model import saved

MOST_BYTES = 50 * 2**20


class Reader:
    """The newest model that could be loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version, self.learner = self._load()

    def _load(self) -> tuple[int, ContinualLearner]:
        number = saved.record(self.path).version.number  # first: what is loaded is this one or a newer
        return number, ContinualLearner.load(self.path)

    def follow(self) -> None:
        """Load the model again whenever it was replaced; what cannot be loaded leaves the old one."""
        while True:
            time.sleep(1)
            try:
                if saved.record(self.path).version.number != self.version:
                    self.version, self.learner = self._load()
            except DualPromptError as error:
                sys.stderr.write(f"{error}\n")


class Handler(BaseHTTPRequestHandler):
    """Answers to pictures."""

    reader: Reader
    timeout = 30

    def do_GET(self) -> None:
        """Tell the version and the classes: a proxy may ask this to see whether we live."""
        self._send(200, {"version": self.reader.version, "classes": self.reader.learner.classes})

    def do_POST(self) -> None:
        """Tell what the picture in the body shows."""
        length = self.headers.get("Content-Length", "")
        if not (length.isdecimal() and int(length) <= MOST_BYTES):
            self._send(413, {"error": f"send one image of at most {MOST_BYTES} bytes, with its Content-Length"})
            return
        try:
            self._send(200, self.reader.learner.predict(self.rfile.read(int(length))).to_dict())
        except DualPromptError as error:
            self._send(422, {"error": str(error)})

    def _send(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    Handler.reader = Reader(Path(sys.argv[1]))
    threading.Thread(target=Handler.reader.follow, daemon=True).start()
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
