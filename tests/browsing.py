"""What tests of the page share: a real browser, the real server with a tiny model, pictures, and what was seen."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sandbox import World

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MARKS = [
    pytest.mark.xdist_group("page"),  # they share a server
    pytest.mark.usefixtures("quick_python"),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (Debian: apt install chromium)"),
]
expect = playwright.expect
expect.set_options(timeout=20_000)

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 190, 40),
    "blue": (30, 40, 220),
    "white": (240, 240, 240),
    "black": (15, 15, 15),
}
OPTIONS = {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3}
REFUSED = re.compile(r"the server responded with a status of 4\d\d")
SLOW = 180_000  # milliseconds; only ever waited for on a busy machine


@dataclass(frozen=True)
class Place:
    """Folders of pictures named by their colour, and a model that knows red and green."""

    pictures: Path
    model: Path

    def some(self, *names: str) -> list[Path]:
        return [self.pictures / "test" / f"{name}.png" for name in names]

    def folder(self, *names: str, images: int = 8) -> Path:
        """Return a folder with a folder for each class."""
        folder = self.pictures / f"lesson {' '.join(names)} {images}"
        for name in names:
            (folder / name).mkdir(parents=True, exist_ok=True)
            for number in range(images):
                shutil.copy(self.pictures / "train" / name / f"{number}.png", folder / name)
        return folder

    def zip(self, *names: str) -> Path:
        """Return a zip of such a folder."""
        folder = self.folder(*names)
        path = folder.with_suffix(".zip")
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(folder.rglob("*.png")):
                archive.write(file, Path("pictures") / file.relative_to(folder))
        return path


def draw(path: Path, colour: tuple[int, int, int], seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.array(colour) + np.random.default_rng(seed).normal(0, 8, (24, 30, 3))
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path)


@pytest.fixture(scope="module")
def place(world: World, tmp_path_factory: pytest.TempPathFactory) -> Place:
    from dualprompt import ContinualLearner

    folder = tmp_path_factory.mktemp("page")
    for name, colour in COLOURS.items():
        draw(folder / "test" / f"{name}.png", colour, 100)
        for number in range(12):
            draw(folder / "train" / name / f"{number}.png", colour, number)
    place = Place(folder, folder / "model")
    learner = ContinualLearner(str(world.weights), "dualprompt", options=OPTIONS, device="cpu")
    learner.learn(place.folder("red", "green", images=12), name="Warm and cold")
    learner.save(place.model)
    return place


@contextlib.contextmanager
def serve(model: Path, *options: str, python: str = "") -> Iterator[str]:
    """Run the server with some Python (default: `sys.executable`); yield the address of its page, as it tells it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python or sys.executable, "-m", "dualprompt.cli", "serve", str(model)]
    command += ["--port", str(port), "--json", *options]
    log = model.parent / f"server-{port}.log"
    said = log.with_suffix(".said")
    with log.open("wb") as out, said.open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | {"OMP_NUM_THREADS": "1"})
    address = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}healthz"):
                break
            assert process.poll() is None, said.read_text()
            time.sleep(0.1)
        yield json.loads(log.read_text())["page"]
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def address(place: Place, _quick: str) -> Iterator[str]:
    with serve(place.model, python=_quick) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Seen:
    """What the browser complained about while a test ran."""

    complaints: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)  # the browser calls every 4xx an error; tests say which they want

    def hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            (self.refusals if REFUSED.search(message.text) else self.complaints).append(message.text)


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def page(browser: Any, seen: Seen) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, locale="en-GB")
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.on("console", seen.hear)
    page.on("filechooser", lambda _: None)  # the first listener is slow to take effect; a key pressed then is lost
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on("request", lambda request: seen.complaints.extend([request.url] if "127.0.0.1" not in request.url else []))
    yield page
    context.close()
    assert seen.complaints == []


def answers(page: Any) -> dict[str, str]:
    """Return the heading of every card by its file, once all are there."""
    expect(page.locator("#results > [aria-busy]")).to_have_count(0)
    cards = page.locator("#results > li").all()
    return {card.locator(".file").inner_text(): card.locator("h3").inner_text() for card in cards}


def start(page: Any) -> None:
    """Start teaching whatever a look at the pictures found, and wait until it learns."""
    page.get_by_role("button", name="Start teaching").click()
    learning, anyway = page.get_by_role("heading", name="Learning"), page.get_by_role("button", name="Teach it anyway")
    expect(learning.or_(anyway)).to_be_visible(timeout=SLOW)
    if anyway.is_visible():
        anyway.click()
    expect(learning).to_be_visible(timeout=SLOW)
