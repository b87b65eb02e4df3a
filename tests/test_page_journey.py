"""The way of a newcomer through the page, by mouse and by the keyboard alone, wide and narrow, light and dark.

With $DUALPROMPT_SHOTS, a folder, the page is photographed at each step.
"""
# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browsing import MARKS, SLOW, Place, Seen, answers, browser, expect, page, place, seen, serve, start
from contrast import CONTRAST
from dualprompt import ContinualLearner
from sandbox import World

pytestmark = MARKS
SHOTS = os.environ.get("DUALPROMPT_SHOTS")


class Walker:
    """Looks at the page after each step: readable, not wider than the screen, photographed if wished."""

    def __init__(self, page: Any, name: str) -> None:
        self.page, self.name, self.steps = page, name, 0

    def look(self, step: str) -> None:
        self.steps += 1
        self.page.wait_for_timeout(150)  # until what moves has come to rest
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), step
        assert self.page.evaluate(CONTRAST) == [], step
        if SHOTS:
            path = Path(SHOTS) / f"{self.name}-{self.steps:02}-{step}.png"
            dialog = self.page.locator("dialog[open]").count() > 0  # whose backdrop covers what is on the screen
            self.page.screenshot(path=path, full_page=not dialog)


@pytest.fixture
def new(world: World, tmp_path: Path) -> Iterator[str]:
    with serve(tmp_path / "new", "--backbone", str(world.weights), "--method", "lda") as address:
        yield address


OTHERS = [pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1280, "dark"), (390, "light"))]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark"), *OTHERS])
def test_from_nothing_to_undo(page: Any, place: Place, new: str, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    walker = Walker(page, f"{width}-{scheme}")
    page.goto(new)
    expect(page.get_by_role("heading", name="Teach it something new")).to_be_visible()  # there is nothing else to do
    walker.look("new")

    folder = place.folder("red", "green", "blue", images=12)
    page.set_input_files("#teach-folder", folder)
    expect(page.get_by_label("Name of this lesson")).to_have_value(folder.name)
    walker.look("lesson")
    start(page)
    expect(page.get_by_role("heading", name="Learned")).to_be_visible(timeout=SLOW)
    expect(page.locator("#job-end")).to_contain_text(re.compile(r"\d+ of \d+ right \(\d+ to \d+ %\)"))
    walker.look("learned")

    page.get_by_role("link", name="Classify pictures").click()
    page.set_input_files("#classify-files", place.some("red", "green", "white"))
    assert answers(page)["red.png"] == "red > 99.9 %"  # never what looks like certainty
    why = page.get_by_role("button", name="Why? red.png")
    why.click()
    expect(page.locator(".heat canvas")).to_be_visible()
    expect(page.locator(".heat")).to_contain_text("Bright is where it looked.")
    walker.look("answers")
    why.click()
    expect(page.locator(".heat")).to_have_count(0)
    card = page.locator("#results > li", has_text="white.png")
    card.get_by_role("button", name="Wrong? white.png").click()
    card.get_by_label("It is").fill("purple")
    card.get_by_role("button", name="Correct").click()
    expect(card).to_contain_text("It does not know “purple” yet. Teach it as a new class.")
    card.get_by_label("It is").fill("green")
    walker.look("wrong")
    card.get_by_role("button", name="Correct").click()
    expect(page.locator("#corrections-text")).to_have_text("1 correction to be taught.")
    page.get_by_role("button", name="Teach them now").click()
    expect(page.get_by_role("heading", name="Learned")).to_be_visible(timeout=SLOW)
    expect(page.locator("#job-end")).to_contain_text("More pictures of green.")

    page.get_by_role("tab", name="Model").click()
    expect(page.locator("#tasks .task-facts")).to_contain_text("from 37 pictures")
    page.get_by_role("button", name="Change the class green").click()
    walker.look("class")
    with page.expect_file_chooser() as chooser:
        page.locator("label[for=class-more]").click()
    chooser.value.set_files(sorted((place.pictures / "train" / "green").iterdir())[:6])
    expect(page.get_by_role("heading", name="Learned")).to_be_visible(timeout=SLOW)
    page.get_by_role("tab", name="Model").click()
    expect(page.locator("#tasks .task-facts")).to_contain_text("from 43 pictures")
    page.get_by_role("button", name="Change the class green").click()
    page.get_by_label("Name", exact=True).fill("Leaf green")
    page.get_by_role("button", name="Rename").click()
    expect(page.locator(".chip-name")).to_have_text(["blue", "Leaf green", "red"])

    expect(page.locator("#confusion tbody tr")).to_have_count(3)  # of pictures left out while learning
    test = place.folder("red", "blue", images=5)
    page.set_input_files("#test-folder", test)
    expect(page.locator("#confusion-words")).to_contain_text(re.compile(r"Your pictures. \d+ of 10 right"))
    expect(page.locator("#by-class li")).to_have_count(2)
    walker.look("model")

    page.get_by_role("button", name="Forget the class Leaf green").click()
    expect(page.get_by_role("dialog")).to_contain_text("Forget the class “Leaf green”?")
    walker.look("forget")
    page.get_by_role("button", name="Forget it").click()
    expect(page.locator(".chip-name")).to_have_text(["blue", "red"])
    page.get_by_role("button", name=re.compile("^Undo: forgot")).click()
    expect(page.locator(".chip-name")).to_have_text(["blue", "Leaf green", "red"])
    walker.look("undone")


def press(page: Any, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def reach(page: Any, name: str, most: int = 80, *, back: bool = False) -> None:
    """Press Tab, or with Shift to go `back`, until what has the focus is called so."""
    for _ in range(most):
        at = page.evaluate(
            "(() => { const at = document.activeElement; const label = at.labels?.[0];"
            "return [at.id, at.getAttribute('aria-label'), label?.innerText, at.textContent.trim()]; })()"
        )
        if name in at:
            return
        page.keyboard.press("Shift+Tab" if back else "Tab")
    raise AssertionError(f"'{name}' is not reached by Tab")


def choose(page: Any, name: str, files: Any) -> None:
    """Reach a button for files, press Enter on it, and give it some."""
    reach(page, name)
    with page.expect_file_chooser() as chooser:
        press(page, "Enter")
    chooser.value.set_files(files)


def learned(page: Any, words: str) -> None:
    """Wait until a lesson has ended; whatever a look at the pictures found, it is taught."""
    done, anyway = page.get_by_role("heading", name="Learned"), page.get_by_role("button", name="Teach it anyway")
    expect(done.or_(anyway)).to_be_visible(timeout=SLOW)
    if anyway.is_visible():
        reach(page, "teach-start")
        press(page, "Enter")
    expect(done).to_be_visible(timeout=SLOW)
    expect(page.locator("#job-end")).to_contain_text(words)


REST = [pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1280, "light"), (390, "dark"))]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light"), *REST])
def test_the_same_with_the_keyboard_alone(page: Any, place: Place, new: str, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    walker = Walker(page, f"keyboard-{width}-{scheme}")
    page.goto(new)
    reach(page, "add-name")
    for name in ("red", "blue"):
        page.keyboard.type(name)
        with page.expect_file_chooser() as chooser:
            press(page, "Enter")
        chooser.value.set_files(sorted((place.pictures / "train" / name).iterdir())[:8])
        expect(page.locator("#lesson-count")).to_contain_text("class")
        expect(page.locator("#add-name")).to_be_focused()
    expect(page.locator("#lesson-count")).to_have_text("2 classes, 16 pictures")
    reach(page, "teach-start")
    walker.look("teach")
    press(page, "Enter")
    learned(page, "blue and red")

    reach(page, "Classify pictures")
    press(page, "Enter")
    expect(page.locator("#tab-classify")).to_be_focused()
    choose(page, "classify-files", place.some("red"))
    assert answers(page)["red.png"].startswith("red")
    reach(page, "Why? red.png")
    press(page, "Enter")
    expect(page.locator(".heat canvas")).to_be_visible()
    press(page, "Enter")
    expect(page.locator(".heat")).to_have_count(0)
    reach(page, "Wrong? red.png")
    press(page, "Enter")
    page.keyboard.type("blue")
    walker.look("correct")
    press(page, "Enter")
    expect(page.locator("#corrections-text")).to_have_text("1 correction to be taught.")
    reach(page, "corrections-teach", back=True)
    press(page, "Enter")
    learned(page, "More pictures of blue.")

    reach(page, "See the model")
    press(page, "Enter")
    expect(page.get_by_role("heading", name="What it knows")).to_be_visible()
    reach(page, "Change the class red")
    press(page, "Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    choose(page, "class-more", sorted((place.pictures / "train" / "red").iterdir())[8:])
    learned(page, "More pictures of red.")
    reach(page, "See the model")
    press(page, "Enter")
    expect(page.locator("#tasks .task-facts")).to_contain_text("from 21 pictures")
    reach(page, "Change the class red")
    press(page, "Enter")
    reach(page, "class-name")
    press(page, "Control+a")
    page.keyboard.type("crimson")
    press(page, "Enter")
    expect(page.locator(".chip-name")).to_have_text(["blue", "crimson"])

    choose(page, "test-folder", place.folder("blue", images=3))
    expect(page.locator("#confusion-words")).to_contain_text(re.compile(r"Your pictures. \d of 3 right"))
    reach(page, "What was taken for what")  # which scrolls with the arrow keys
    walker.look("confusion")

    reach(page, "Forget the class crimson", back=True)
    press(page, "Enter")
    reach(page, "Forget it", 4)
    press(page, "Enter")
    expect(page.locator(".chip-name")).to_have_text(["blue"])
    reach(page, "undo")
    press(page, "Enter")
    expect(page.locator(".chip-name")).to_have_text(["blue", "crimson"])
    walker.look("undone")


def test_review_in_the_page(page: Any, place: Place, world: World, tmp_path: Path) -> None:
    learner = ContinualLearner(str(world.weights), "lda", device="cpu")
    learner.learn(place.folder("red", "green", images=12), name="Two")
    learner.threshold = 2.0  # more than anything reaches
    model = learner.save(tmp_path / "model")
    with serve(model, "--review", "3") as address:
        page.goto(address)
        expect(page.locator("#classify-hint")).to_contain_text("kept for 3 days")
        page.set_input_files("#classify-files", place.some("red", "green"))
        assert set(answers(page).values()) == {"None of these"}
        page.get_by_role("tab", name="Review").click()
        cards = page.locator("#review-list > li")
        expect(cards).to_have_count(2)
        Walker(page, "review").look("queue")
        cards.first.get_by_label("It is").fill("nobody")
        cards.first.get_by_role("button", name="Save").click()
        expect(cards.first).to_contain_text("It does not know “nobody”")
        cards.first.get_by_label("It is").fill("red")
        cards.first.get_by_role("button", name="Save").click()
        cards.nth(1).get_by_role("button", name=re.compile("^Delete")).click()
        expect(cards).to_have_count(1)
        page.get_by_role("button", name="Learn 1 named picture").click()
        expect(page.get_by_role("heading", name="Learned")).to_be_visible(timeout=SLOW)
        page.get_by_role("tab", name="Review").click()
        expect(page.locator("#review-empty")).to_be_visible()


def test_hundreds_of_classes_are_searched(page: Any, place: Place, world: World, tmp_path: Path) -> None:
    learner = ContinualLearner(str(world.weights), device="cpu")
    red = sorted((place.pictures / "train" / "red").iterdir())
    many = {f"kind {number}": [red[number % 12], red[(number + 1) % 12]] for number in range(300)}
    two = {name: sorted((place.pictures / "train" / name).iterdir()) for name in ("blue", "white")}
    choice = learner.learn(two, name="Two", prompts="always", epochs=1).prompts
    assert choice is not None
    assert choice.held == 4
    learner.learn(many, name="Many", prompts="never")
    model = learner.save(tmp_path / "model")
    with serve(model) as address:
        page.goto(f"{address}")
        page.get_by_role("tab", name="Model").click()
        expect(page.locator(".chip-name")).to_have_count(302)
        told = f"Practised: of 4 pictures, {choice.with_prompts} right with practice, {choice.without} without"
        expect(page.locator(".practice")).to_have_text([told, "Learned at one look, without practice"])
        expect(page.locator("#confusion-words")).to_contain_text("Shown are the 30 of 302 classes with most mistakes.")
        expect(page.locator("#confusion tbody tr")).to_have_count(30)
        expect(page.locator("#by-class li")).to_have_count(30)
        page.get_by_label("Find a class").fill("kind 29")
        expect(page.locator(".chip-name")).to_have_count(11)
        page.get_by_label("Find a class").fill("nothing like it")
        expect(page.locator("#search-none")).to_be_visible()
        Walker(page, "many").look("search")
