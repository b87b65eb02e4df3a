"""The page of `dualprompt serve`, driven in a real browser against the real server with a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
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

from contrast import CONTRAST
from sandbox import COMMAND, World

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.xdist_group("page"),  # they share a server
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
def serve(model: Path, *options: str) -> Iterator[str]:
    """Run the server; yield the address of its page, as it tells it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [COMMAND, "serve", str(model), "--port", str(port), "--json", *options]
    log = model.parent / f"server-{port}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"})
    address = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}healthz"):
                break
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield json.loads(log.read_text())["page"]
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def address(place: Place) -> Iterator[str]:
    with serve(place.model) as address:
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


def test_classify_teach_classify_forget(page: Any, place: Place, address: str, seen: Seen) -> None:
    page.goto(address)
    expect(page.locator("#knows")).to_have_text("2 classes in 1 task")
    broken = place.pictures / "broken.png"
    broken.write_bytes(b"no picture")
    page.set_input_files("#classify-files", [*place.some("red", "green"), broken])
    found = answers(page)
    assert found["red.png"].startswith("red"), found
    assert found["green.png"].startswith("green"), found
    assert found["broken.png"] == "No answer"
    assert len(seen.refusals) == 1
    card = page.locator("#results > li", has_text="red.png")
    expect(card.locator(".why")).to_contain_text(
        re.compile(r"Task: Warm and cold · .*like its pictures, similarity \d\.\d\d")
    )
    shown = [float(text.strip("<> %")) for text in card.locator(".bar-value").all_inner_texts()]
    assert shown == sorted(shown, reverse=True)
    assert sum(shown) == pytest.approx(100, abs=0.3)
    drawn = card.locator("canvas").evaluate("c => [...c.getContext('2d').getImageData(20, 20, 1, 1).data]")
    assert drawn[0] > 150 > 100 > drawn[2], drawn  # the picture itself, not an empty square

    page.get_by_role("tab", name="Teach").click()
    page.set_input_files("#teach-folder", place.folder("blue", "white"))
    expect(page.locator("#lesson-count")).to_have_text("2 classes, 16 pictures")
    page.get_by_label("Name of class 2").fill("pale")  # was white
    page.get_by_label("Name of this task").fill("Warm and cold")
    page.get_by_role("button", name="Start teaching").click()
    expect(page.locator("#teach-said")).to_contain_text("A task is called “Warm and cold” already.")
    expect(page.locator("#teach-again-offer")).to_be_hidden()
    page.get_by_label("Name of this task").fill("Sky")
    page.evaluate(
        """() => { window.steps = [];
        new MutationObserver(() => steps.push([document.getElementById("job-bar").value,
            document.getElementById("job-message").textContent]))
        .observe(document.getElementById("job"), {subtree: true, attributes: true, childList: true}); }"""
    )
    page.get_by_role("button", name="Start teaching").click()
    expect(page.get_by_role("heading", name="Learned")).to_be_visible(timeout=SLOW)
    expect(page.locator("#job-end")).to_contain_text("Sky: ")
    steps = page.evaluate("steps")
    assert len({part for part, _ in steps}) > 2, steps
    assert any(message for _, message in steps), steps

    page.get_by_role("link", name="Classify pictures").click()
    page.get_by_role("button", name="Clear").click()
    page.set_input_files("#classify-files", place.some("blue", "white"))
    found = answers(page)
    assert found["blue.png"].startswith("blue"), found
    assert found["white.png"].startswith("pale"), found
    assert "Sky" in page.locator("#results > li", has_text="blue.png").locator(".why").inner_text()

    page.get_by_role("tab", name="Model").click()
    task = page.locator("#tasks > li", has_text="Sky")
    expect(task.locator(".chips li")).to_have_count(2)
    forget = task.get_by_role("button", name="Forget the task Sky")
    forget.click()
    expect(page.get_by_role("dialog")).to_contain_text("Forget the task “Sky”?")
    page.get_by_role("button", name="Keep it").click()
    expect(task).to_be_visible()
    task.get_by_role("button", name="Forget the class pale").click()
    page.get_by_role("button", name="Forget it").click()
    expect(task.locator(".chips li")).to_have_text(["blue"])
    forget.click()
    page.get_by_role("button", name="Forget it").click()
    expect(page.locator("#tasks > li")).to_have_count(1)
    expect(page.locator("#knows")).to_have_text("2 classes in 1 task")
    page.get_by_role("tab", name="Classify").click()
    page.set_input_files("#classify-files", place.some("black"))
    answers(page)
    names = page.locator("#results > li", has_text="black.png").locator(".bar-name").all_inner_texts()
    assert sorted(names) == ["green", "red"]


def drop(page: Any, *paths: Path) -> None:
    """Let files and folders fall onto the page, as from a file manager."""
    devtools = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        devtools.send("Input.dispatchDragEvent", {"type": kind, "x": 600, "y": 250, "data": data})


def test_zip_drops_and_refusals(page: Any, place: Place, address: str, seen: Seen) -> None:
    page.goto(address)
    page.get_by_role("tab", name="Teach").click()
    said = page.locator("#teach-said")
    lesson = place.folder("black", images=4)
    (lesson / "black" / "broken.png").write_bytes(b"no picture")
    (lesson / "black" / "notes.txt").write_text("no picture either")
    drop(page, lesson / "black", *place.some("white"))
    rows = page.locator("#lesson-list > li")
    expect(rows).to_have_count(2)
    expect(said).to_have_text("1 file is left out: not pictures.", use_inner_text=True)
    expect(page.locator("#lesson-list input:focus")).to_have_value("")  # the loose picture waits for its name
    page.get_by_role("button", name="Start teaching").click()
    expect(said).to_contain_text("One class has no name yet.")
    page.get_by_role("button", name="Remove the unnamed class").click()
    page.get_by_role("button", name="Start teaching").click()
    expect(said).to_contain_text(re.compile("black/.*broken.png.* is not an image"))  # the server's words
    expect(page.get_by_label("Name of class 1")).to_have_value("black")  # nothing has to be chosen again
    page.get_by_role("button", name="Remove all").click()
    expect(rows).to_have_count(0)

    drop(page, place.zip("red", "black"))
    expect(page.locator("#lesson-list .inside")).to_contain_text(["black", "red"])
    expect(page.locator("#lesson-list .inside", has_text="red")).to_contain_text("It knows this class already")
    page.get_by_role("button", name="Start teaching").click()
    expect(said).to_contain_text("It knows “red” already")
    assert len(seen.refusals) == 1  # it was not sent in vain
    page.get_by_label("Teach it again, as a new expert").check()
    page.get_by_role("button", name="Start teaching").click()
    page.get_by_role("button", name="Give up").click()
    expect(said).to_contain_text("Given up. The model is as it was.")
    page.get_by_role("button", name="Start teaching").click()
    page.get_by_label("Teach it again, as a new expert").check()
    page.get_by_role("button", name="Start teaching").click()
    expect(page.get_by_role("heading", name="Learning")).to_be_visible()
    page.reload()  # it goes on, and so does the watching
    expect(page.get_by_role("heading", name="Learned")).to_be_visible(timeout=SLOW)
    page.get_by_role("link", name="See the model").click()
    expect(page.locator("#tasks > li")).to_have_count(2)
    expect(page.locator("#tasks > li").nth(1).locator(".chips li")).to_have_text(["black", "red"])


def walk(page: Any, most: int = 40) -> list[str]:
    """Press Tab until the focus leaves the page; return what had it, and see that it shows."""
    stops = []
    for _ in range(most):
        page.keyboard.press("Tab")
        stop = page.evaluate(
            """() => { const at = document.activeElement;
            if (at === document.body) return null;
            const shown = at.matches(".picker input") ? at.nextElementSibling : at;
            const style = getComputedStyle(shown);
            return {name: at.id || at.getAttribute("aria-label") || at.textContent.trim(),
                    ring: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2}; }"""
        )
        if stop is None or stop["name"] in stops:
            return stops
        assert stop["ring"], f"no ring around {stop['name']}"
        stops.append(stop["name"])
    return stops


def test_keyboard_alone(page: Any, place: Place, address: str) -> None:
    page.goto(address)
    expect(page.locator("#knows")).to_contain_text("classes in")
    assert walk(page)[:2] == ["tab-classify", "classify-files"]
    page.locator("#classify-files").focus()
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(place.some("red"))
    assert answers(page)["red.png"].startswith("red")
    expect(page.locator("#live")).to_contain_text("red.png: red")

    page.locator("#tab-classify").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-teach"
    assert walk(page)[:4] == ["teach-folder", "teach-zip", "add-name", "add-files"]
    page.locator("#add-name").focus()
    page.keyboard.type("night")
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(sorted((place.pictures / "train" / "black").iterdir()))
    expect(page.locator("#lesson-count")).to_have_text("1 class, 12 pictures")
    expect(page.locator("#add-name")).to_be_focused()
    stops = ["add-files", "lesson-clear", "class-0", "Remove night", "task-name", "task-epochs", "teach-start"]
    assert walk(page)[:7] == stops
    page.get_by_role("button", name="Remove night").focus()
    page.keyboard.press("Space")
    expect(page.locator("#lesson")).to_be_hidden()
    assert page.evaluate("document.activeElement.id") == "teach-folder"

    page.locator("#tab-teach").focus()
    page.keyboard.press("End")
    page.locator("#tasks button").first.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "Keep it"  # the harmless one
    page.keyboard.press("Escape")
    expect(page.locator("#confirm")).to_be_hidden()
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Forget the task")


# Who speaks to the page says what is to be seen: a name must contain it.
MISNAMED = """() => [...document.querySelectorAll("button, a, input")]
  .map((at) => [at.ariaLabel, (at.labels?.[0] ?? at).innerText.trim()])
  .filter(([name, seen]) => name !== null && !name.includes(seen))"""
CONTROLS = {
    "button",
    "link",
    "textbox",
    "spinbutton",
    "checkbox",
    "tab",
    "progressbar",
    "dialog",
    "tabpanel",
    "image",
    "table",
}


def check_part(page: Any) -> None:
    """Every control has a name, every text can be read, no id comes twice, nothing is wider than the screen."""
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    nodes = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]]
    assert [role for role, name in nodes if role.lower() in CONTROLS and not name.strip()] == []
    assert sum(role == "heading" for role, _ in nodes) >= 1
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(MISNAMED) == []
    assert (
        page.evaluate(
            "[...document.querySelectorAll('[id]')].map((e) => e.id).filter((id, i, all) => all.indexOf(id) !== i)"
        )
        == []
    )
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1280, "dark")])
def test_names_contrast_and_width(page: Any, place: Place, address: str, width: int, scheme: str, seen: Seen) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    page.goto(address)
    expect(page.locator("#knows")).to_contain_text("classes in")
    broken = place.pictures / "a very long name without any place to break it, of a file that is no picture at all.png"
    broken.write_bytes(b"")
    page.set_input_files("#classify-files", [*place.some("red"), broken])
    answers(page)
    page.locator("summary").click()
    check_part(page)
    page.get_by_role("tab", name="Teach").click()
    page.set_input_files("#teach-folder", place.folder("red", "blue"))
    page.get_by_role("button", name="Start teaching").click()
    expect(page.locator("#teach-said")).to_be_visible()
    check_part(page)
    page.get_by_role("tab", name="Model").click()
    expect(page.locator("#facts")).to_contain_text("Backbone")
    check_part(page)
    page.locator("#tasks button").first.click()
    check_part(page)


def test_without_the_token_it_answers_and_does_not_change(page: Any, place: Place, address: str, seen: Seen) -> None:
    page.goto(address)
    assert "token" not in page.url  # it is taken, and out of sight
    page.get_by_role("button", name="Forget my access token").click()
    page.set_input_files("#classify-files", place.some("red"))
    assert answers(page)["red.png"].startswith("red")
    sent: list[str] = []
    page.on("request", lambda request: sent.extend([request.method] if request.method != "GET" else []))
    page.get_by_role("tab", name="Model").click()
    page.locator("#tasks button").first.click()
    page.get_by_role("button", name="Forget it").click()
    expect(page.get_by_role("dialog")).to_contain_text("Access token")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.locator("#model-said")).to_contain_text("access token")

    page.get_by_role("tab", name="Teach").click()
    page.set_input_files("#teach-folder", place.folder("blue"))
    page.get_by_role("button", name="Start teaching").click()
    expect(page.get_by_role("dialog")).to_contain_text("Access token")
    expect(page.locator("#job")).to_be_hidden()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.locator("#teach-said")).to_contain_text("access token")
    assert sent == []  # nothing in vain

    page.evaluate("address => { location.href = address; }", address)  # as put into the open tab's address bar
    expect(page.get_by_role("button", name="Forget my access token")).to_be_visible()
    assert "token" not in page.url
    expect(page.get_by_label("Name of class 1")).to_have_value("blue")  # what was being done is still there
    page.get_by_role("button", name="Start teaching").click()
    page.get_by_role("button", name="Give up").click()
    expect(page.locator("#teach-said")).to_contain_text("Given up")
    assert sent[:1] == ["POST"]


def test_token(page: Any, place: Place, seen: Seen, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(place.model, model, ignore=shutil.ignore_patterns(".serve"))
    with serve(model, "--token", "open sesame, please") as address:
        page.goto(address)
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Token").fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("not accepted")
        dialog.get_by_label("Token").fill("open sesame, please")
        page.keyboard.press("Enter")
        expect(page.locator("#knows")).to_contain_text("classes in")
        page.reload()
        expect(page.locator("#knows")).to_contain_text("classes in")  # asked once
        assert json.loads(page.evaluate("JSON.stringify([localStorage.length, document.cookie])")) == [0, ""]
        page.set_input_files("#classify-files", place.some("red"))
        assert answers(page)["red.png"].startswith("red")
        page.get_by_role("button", name="Forget my access token").click()
        page.set_input_files("#classify-files", place.some("green"))
        expect(dialog).to_be_visible()
        dialog.get_by_role("button", name="Cancel").click()
        assert answers(page)["green.png"] == "No answer"
        assert len(seen.refusals) == 3
