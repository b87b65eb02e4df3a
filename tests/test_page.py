"""The page of `dualprompt serve`, driven in a real browser against the real server with a tiny model."""
# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from browsing import MARKS, SLOW, Place, Seen, address, answers, browser, expect, page, place, seen, serve, start
from contrast import CONTRAST

pytestmark = MARKS


def test_classify_teach_classify_forget(page: Any, place: Place, address: str, seen: Seen) -> None:
    page.goto(address)
    expect(page.locator("#knows")).to_have_text("2 classes")
    broken = place.pictures / "broken.png"
    broken.write_bytes(b"no picture")
    page.set_input_files("#classify-files", [*place.some("red", "green"), broken])
    found = answers(page)
    assert found["red.png"].startswith("red"), found
    assert found["green.png"].startswith("green"), found
    assert found["broken.png"] == "No answer"
    assert len(seen.refusals) == 1
    card = page.locator("#results > li", has_text="red.png")
    for word in ("expert", "epoch", "similarity", "task", "prompt"):
        expect(page.locator("#classify")).not_to_contain_text(re.compile(word, re.I))
    drawn = card.locator("canvas").evaluate("c => [...c.getContext('2d').getImageData(20, 20, 1, 1).data]")
    assert drawn[0] > 150 > 100 > drawn[2], drawn  # the picture itself, not an empty square

    page.get_by_role("tab", name="Teach").click()
    page.set_input_files("#teach-folder", place.folder("blue", "white"))
    expect(page.locator("#lesson-count")).to_have_text("2 classes, 16 pictures")
    page.get_by_label("Name of class 2").fill("pale")  # was white
    page.get_by_label("Name of this lesson").fill("Warm and cold")
    page.get_by_role("button", name="Start teaching").click()
    expect(page.locator("#teach-said")).to_contain_text("A lesson is called “Warm and cold” already.")
    page.get_by_label("Name of this lesson").fill("Sky")
    page.evaluate(
        """() => { window.steps = [];
        const wait = window.setTimeout;  // a lesson this small may end between two looks of the page
        window.setTimeout = (then, after) => wait(then, Math.min(after, 20));
        new MutationObserver(() => steps.push([document.getElementById("job-bar").value,
            document.getElementById("job-message").textContent]))
        .observe(document.getElementById("job"), {subtree: true, attributes: true, childList: true}); }"""
    )
    start(page)
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

    page.get_by_role("tab", name="Model").click()
    task = page.locator("#tasks > li", has_text="Sky")
    expect(task.locator(".chips li")).to_have_count(2)
    expect(task.locator("p")).to_have_count(2)  # when and how well; its method has no choice of practice
    expect(task).not_to_contain_text("null")
    forget = task.get_by_role("button", name="Forget the lesson Sky")
    forget.click()
    expect(page.get_by_role("dialog")).to_contain_text("Forget the lesson “Sky”?")
    page.get_by_role("button", name="Keep it").click()
    expect(task).to_be_visible()
    task.get_by_role("button", name="Forget the class pale").click()
    page.get_by_role("button", name="Forget it").click()
    expect(task.locator(".chips li")).to_have_text(["blue"])
    forget.click()
    page.get_by_role("button", name="Forget it").click()
    expect(page.locator("#tasks > li")).to_have_count(1)
    expect(page.locator("#knows")).to_have_text("2 classes")
    page.get_by_role("tab", name="Classify").click()
    page.set_input_files("#classify-files", place.some("black"))
    answers(page)
    page.get_by_role("tab", name="Model").click()
    page.get_by_role("button", name=re.compile("^Undo")).click()
    expect(page.locator("#tasks > li")).to_have_count(2)
    page.get_by_role("button", name="Forget the lesson Sky").click()
    page.get_by_label("For good").check()
    page.get_by_role("button", name="Forget it").click()
    expect(page.locator("#tasks > li")).to_have_count(1)
    expect(page.locator("#versions")).not_to_contain_text("Sky", use_inner_text=True)


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
    expect(said).to_have_text("1 file is left out, being no pictures: notes.txt.", use_inner_text=True)
    expect(page.locator("#lesson-list input:focus")).to_have_value("")  # the loose picture waits for its name
    page.get_by_role("button", name="Start teaching").click()
    expect(said).to_contain_text("One class has no name yet.")
    page.get_by_role("button", name="Remove the unnamed class").click()
    page.get_by_role("button", name="Start teaching").click()
    findings = page.locator("#check-list")
    expect(findings).to_contain_text(re.compile("black/.*broken.png.* is not an image"))  # the server's words
    expect(said).to_be_hidden()  # all classes have names now
    expect(page.get_by_label("Name of class 1")).to_have_value("black")  # nothing has to be chosen again
    page.get_by_role("button", name="Remove all").click()
    expect(rows).to_have_count(0)

    drop(page, place.zip("red", "black"))
    expect(page.locator("#lesson-list .inside")).to_contain_text(["black", "red"])
    expect(page.locator("#lesson-list .inside", has_text="red")).to_contain_text("It knows this class")
    page.get_by_role("button", name="Start teaching").click()
    expect(said).to_contain_text("It knows “red” already")
    assert not seen.refusals  # it was not sent in vain
    page.get_by_role("button", name="Remove all").click()

    drop(page, place.zip("black", "white"))
    expect(page.get_by_label("Name of this lesson")).to_have_value("lesson black white 8")  # as the file is called
    start(page)
    page.get_by_role("button", name="Give up").click()
    expect(said).to_contain_text("Given up. The model is as it was.")
    start(page)
    page.reload()  # it goes on, and so does the watching
    expect(page.get_by_role("heading", name="Learned")).to_be_visible(timeout=SLOW)
    page.get_by_role("link", name="See the model").click()
    expect(page.locator("#tasks > li")).to_have_count(2)
    expect(page.locator("#tasks > li").nth(1).locator(".chips li")).to_have_text(["black", "white"])


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
    expect(page.locator("#knows")).to_contain_text("classes")
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
    stops = ["add-files", "lesson-clear", "class-0", "Remove night", "task-name", "teach-start"]
    assert walk(page)[:6] == stops
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
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Forget the lesson")


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
    "slider",
    "combobox",
    "searchbox",
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
    expect(page.locator("#knows")).to_contain_text("classes")
    broken = place.pictures / "a very long name without any place to break it, of a file that is no picture at all.png"
    broken.write_bytes(b"")
    page.set_input_files("#classify-files", [*place.some("red"), broken])
    answers(page)
    page.get_by_role("button", name="Wrong? red.png").click()
    check_part(page)
    page.get_by_role("tab", name="Teach").click()
    page.set_input_files("#teach-folder", place.folder("red", "blue"))
    page.locator("#lesson summary").click()
    page.get_by_label("Name of this lesson").fill("Warm and cold")
    page.get_by_role("button", name="Start teaching").click()
    expect(page.locator("#teach-said")).to_be_visible()
    check_part(page)
    page.get_by_role("tab", name="Model").click()
    expect(page.locator("#facts")).to_contain_text("Backbone")
    check_part(page)
    page.locator("#tasks button").first.click()
    check_part(page)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Change the class red").click()
    check_part(page)
    page.goto(re.sub("/#.*", "/docs", address))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(CONTRAST) == []


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
    start(page)
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
        expect(page.locator("#knows")).to_contain_text("classes")
        page.reload()
        expect(page.locator("#knows")).to_contain_text("classes")  # asked once
        assert json.loads(page.evaluate("JSON.stringify([localStorage.length, document.cookie])")) == [0, ""]
        page.set_input_files("#classify-files", place.some("red"))
        assert answers(page)["red.png"].startswith("red")
        page.get_by_role("button", name="Forget my access token").click()
        page.set_input_files("#classify-files", place.some("green"))
        expect(dialog).to_be_visible()
        dialog.get_by_role("button", name="Cancel").click()
        assert answers(page)["green.png"] == "No answer"
        assert len(seen.refusals) == 3
