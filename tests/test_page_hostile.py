"""The page with names that are HTML, pictures that are none, and a server that refuses."""
# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from browsing import MARKS, SLOW, Place, Seen, answers, browser, expect, page, place, seen, serve
from dualprompt import ContinualLearner
from sandbox import World

pytestmark = MARKS
HTML = '<img src=x onerror="window.hit=1">'


def unharmed(page: Any) -> None:
    """See that no name became an element, and that none was run."""
    assert page.evaluate("document.querySelectorAll('img, script:not([src])').length") == 0
    assert page.evaluate("window.hit") is None


def test_names_are_text_wherever_they_come_from(page: Any, place: Place, world: World, tmp_path: Path) -> None:
    learner = ContinualLearner(str(world.weights), "lda", device="cpu")
    red, green = (sorted((place.pictures / "train" / name).iterdir()) for name in ("red", "green"))
    learner.learn({HTML: red, "green": green}, name=f"lesson {HTML}")
    learner.threshold = 2.0  # more than anything reaches, so that pictures wait for review
    picture = tmp_path / f"{HTML}.png"
    shutil.copy(place.some("red")[0], picture)
    lesson = tmp_path / "lesson"
    shutil.copytree(place.pictures / "train" / "blue", lesson / f"blue {HTML}")
    shutil.copy(lesson / f"blue {HTML}" / "1.png", lesson / f"blue {HTML}" / f"copy {HTML}.png")
    (lesson / f"blue {HTML}" / f"{HTML}.txt").write_text("no picture")
    with serve(learner.save(tmp_path / "model"), "--review", "1") as address:
        page.goto(address)
        page.set_input_files("#classify-files", picture)
        assert answers(page) == {picture.name: "None of these"}
        page.get_by_role("button", name="Why?").click()
        expect(page.locator(".heat canvas")).to_be_visible()
        expect(page.locator("#results")).to_contain_text(f"The nearest would be {HTML}.")
        unharmed(page)
        page.get_by_role("tab", name="Review").click()
        expect(page.locator("#review-list > li")).to_have_count(1)
        unharmed(page)
        page.get_by_role("tab", name="Teach").click()
        page.set_input_files("#teach-folder", lesson)
        expect(page.locator("#teach-said")).to_contain_text(f"{HTML}.txt")
        page.get_by_role("button", name="Start teaching").click()
        expect(page.locator("#check-list")).to_contain_text(f"The same: blue {HTML}/1.png = ", timeout=SLOW)
        unharmed(page)
        page.get_by_role("tab", name="Model").click()
        expect(page.locator("#versions")).to_contain_text(HTML)
        expect(page.locator("#confusion tbody tr")).to_have_count(2)
        page.get_by_role("button", name="Change the class <img").click()
        expect(page.locator("#class-title")).to_have_text(HTML)
        page.locator("#class-forget").click()
        expect(page.locator("#confirm-title")).to_have_text(f"Forget the class “{HTML}”?")
        unharmed(page)


def test_a_correction_that_could_not_be_taught_is_kept(page: Any, place: Place, world: World, tmp_path: Path) -> None:
    learner = ContinualLearner(str(world.weights), "lda", device="cpu")
    learner.learn(place.folder("red", "green", images=12), name="Two")
    with serve(learner.save(tmp_path / "model")) as address:
        page.goto(address)
        page.set_input_files("#classify-files", place.some("white"))
        page.get_by_role("button", name="Wrong?").click()
        page.get_by_label("It is").fill("green")
        page.get_by_role("button", name="Correct").click()
        asked: list[Any] = []
        page.route("**/more", lambda route: asked.append(route))
        with page.expect_request("**/more"):
            page.get_by_role("button", name="Teach them now").click()
        page.get_by_role("tab", name="Classify").click()
        expect(page.locator("#corrections")).to_be_hidden()  # nobody teaches it twice meanwhile
        asked[0].fulfill(status=429, json={"error": "too many lessons wait"})
        expect(page.locator("#teach-said")).to_have_text("Too many lessons wait.")
        page.unroute("**/more")
        page.get_by_role("tab", name="Classify").click()
        page.get_by_role("button", name="Teach them now").click()
        expect(page.locator("#job-end")).to_contain_text("More pictures of green.", timeout=SLOW)
        page.get_by_role("tab", name="Classify").click()
        expect(page.locator("#corrections")).to_be_hidden()

        test = shutil.copytree(place.folder("red", "green", images=3), tmp_path / "test")
        (test / "red" / "broken.png").write_bytes(b"no picture")
        page.get_by_role("tab", name="Model").click()
        page.set_input_files("#test-folder", test)
        expect(page.locator("#test-said")).to_have_text("1 picture could not be read: broken.png.")
        expect(page.locator("#confusion-words")).to_contain_text("6 of 6 right")
