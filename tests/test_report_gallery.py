"""The report's test pictures: chosen by rule, with the answers that the runs gave, and readable."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from contrast import CONTRAST
from dualprompt.data.arrays import write_arrays
from dualprompt.report import gallery
from dualprompt.run.predictions import read
from sandbox import CLASSES, World, call, make_world

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDE = "dualprompt:init=wide"
LINES = ("frozen-head", "dualprompt", WIDE)
FILE = "predictions.npz"
ANSWER = re.compile(
    r'aria-label="(right|wrong)">(.)</span> <span class="method">(.*?)</span> '
    r'<span class="said">(.*?)</span> <span class="percent">· (\d+)'
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    """A world of its own, and a group of three methods in it, with a report."""
    folder = tmp_path_factory.mktemp("gallery")
    world = make_world(folder)
    done = call("run", world.preset, "--methods", ",".join(LINES), "--out", folder / "run")
    assert done.code == 0, done.err
    assert call("report", folder / "run").code == 0
    return world, folder / "run"


def section(run: Path) -> str:
    html = (run / "report.html").read_text()
    return html[html.index('<section id="pictures">') : html.index('<section id="matching">')]


def cards(run: Path) -> list[str]:
    return section(run).split('<li class="card">')[1:]


def test_every_answer_is_the_run_s(made: tuple[World, Path]) -> None:
    """Each card's picture is found among the test images, and its answers are the predictions for that image."""
    world, run = made
    found = {line: read(run / line.replace(":", "-") / FILE) for line in LINES}
    classes = [
        name
        for task in json.loads((run / "dualprompt" / "manifest.json").read_text())["tasks"]
        for name in task["classes"]
    ]
    assert sorted(classes) == sorted(CLASSES)
    shown = cards(run)
    assert len(shown) == 3 * gallery.EACH
    answers = found["dualprompt"]
    for card in shown:
        truth = re.search(r"<p>(.*?)</p>", card)
        said = ANSWER.findall(card)
        assert truth is not None
        assert f'alt="test picture of {truth[1]}"' in card
        assert [each[2] for each in said] == list(LINES)
        fits = answers.truth == classes.index(truth[1])
        for verdict, mark, line, name, percent in said:
            number = classes.index(name.split(" (task")[0])
            assert (verdict, mark) == (("right", "✓") if name == truth[1] else ("wrong", "✗"))
            fits &= found[line].answer[-1] == number
            fits &= abs(100 * found[line].probability[-1] - int(percent)) <= 0.51
        assert fits.any()
        jpeg = re.search(r'base64,([^"]+)', card)
        assert jpeg is not None
        pixels = np.array(Image.open(io.BytesIO(base64.b64decode(jpeg[1]))))
        files = sorted((world.images / "test" / truth[1]).iterdir())
        shrunk = [np.array(Image.open(file).resize(pixels.shape[1::-1])).astype(float) for file in files]
        assert min(abs(each - pixels).mean() for each in shrunk) < 12  # JPEG of noise; of another image it is over 30


def test_the_counts_are_over_all_images(made: tuple[World, Path]) -> None:
    _, run = made
    base = read(run / "frozen-head" / FILE).right[-1]
    rows = re.findall(r"<tr>(<td.*?)</tr>", section(run))
    assert len(rows) == len(LINES)
    for line, row in zip(LINES, rows, strict=True):
        right = read(run / line.replace(":", "-") / FILE).right[-1]
        wanted = [line, str(int(right.sum())), "27", f"{100 * right.mean():.1f}"]
        gains = [str(int((right & ~base).sum())), str(int((~right & base).sum()))]
        cells = [unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        assert cells == wanted + (["", ""] if line == "frozen-head" else gains)


def test_kinds_take_turns_and_fill_up() -> None:
    # Task 1: three images each of the first three kinds and one of the last; task 2: three that both get right.
    best = np.array([*(1, 1, 1, 0, 0, 0, 1, 1, 1, 0), *(1, 1, 1)], dtype=bool)
    base = np.array([*(0, 0, 0, 0, 0, 0, 1, 1, 1, 1), *(1, 1, 1)], dtype=bool)
    anyone = best | base
    task = np.repeat([0, 1], [10, 3])
    choose = lambda each: gallery.chosen_images(best, base, anyone, task, each)  # noqa: E731
    assert choose(4) == [[0, 3, 6, 9], [10, 11, 12]]
    assert choose(6) == [[0, 1, 3, 4, 6, 9], [10, 11, 12]]
    assert choose(1) == [[0], [10]]
    assert choose(99) == [list(range(10)), [10, 11, 12]]
    assert gallery.chosen_images(best, best, best, task, 4) == [[3, 5, 0, 6], [10, 11, 12]]


def test_what_is_lacking_is_said_and_the_rest_is_shown(made: tuple[World, Path], tmp_path: Path) -> None:
    world, run = made
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "dualprompt" / FILE).unlink()
    assert call("report", copy).code == 0
    text = unescape(section(copy))
    assert f"dualprompt is left out here: {copy / 'dualprompt' / FILE} does not exist" in text
    assert [each.count("aria-label") for each in cards(copy)] == [2] * 3 * gallery.EACH

    path = copy / "frozen-head" / FILE
    with np.load(path) as file:
        columns = {name: file[name] for name in file.files}
    with path.open("wb") as file:
        write_arrays(file, columns | {"classes": np.array(["elm"] * 6)})
    assert call("report", copy).code == 0
    assert "is not the run&#39;s, or lacks answers" in section(copy)
    path.write_bytes(b"no arrays")
    assert call("report", copy).code == 0
    assert "is damaged" in section(copy)
    assert cards(copy)

    moved = world.images.with_name("moved")
    world.images.rename(moved)
    try:
        assert call("report", run, "--out", tmp_path / "without.html").code == 0
    finally:
        moved.rename(world.images)
    html = (tmp_path / "without.html").read_text()
    assert "The pictures themselves are not shown" in html
    assert "<td>frozen-head</td>" in html


def test_pictures_take_less_when_they_are_many() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (gallery.MOST, 300, 200, 3), dtype=np.uint8)
    found = gallery._encoded(list(noise))
    assert sum(map(len, found)) < gallery.BYTES
    assert Image.open(io.BytesIO(base64.b64decode(found[0]))).size == (85, 128)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (Debian: apt install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_them(width: int, scheme: Any, browser: Any, made: tuple[World, Path]) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page.goto((made[1] / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(CONTRAST) == []
    rows = {round(card.bounding_box()["y"]) for card in page.locator(".strip").first.locator(".card").all()}
    assert len(rows) == (1 if width == 1280 else 3)
    for picture in page.locator(".card img").all():
        assert picture.evaluate("e => e.decode().then(() => e.naturalWidth > 0)")
    wrong = page.locator(".wrong-answer .said").first
    assert "underline" in wrong.evaluate("e => getComputedStyle(e).textDecorationLine")
    page.close()
