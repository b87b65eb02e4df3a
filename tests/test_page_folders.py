"""Folders as people have them, in the page: months of classes, files that are no pictures, damaged ones, emoji."""
# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from browsing import MARKS, SLOW, Place, Seen, address, browser, expect, page, place, seen, serve
from sandbox import World

pytestmark = MARKS


@pytest.fixture
def months(place: Place, tmp_path: Path) -> Path:
    """Two months of classes, with a note, a film, and a picture that is none."""
    folder = tmp_path / "year"
    for month, name in (("january", "red"), ("january", "blue"), ("february", "blue 🫐")):
        shutil.copytree(place.pictures / "train" / name.split()[0], folder / month / name)
    (folder / "january" / "notes.txt").write_text("notes")
    (folder / "february" / "film.mov").write_bytes(b"film")
    (folder / "january" / "red" / "broken.png").write_bytes(b"no picture")
    return folder


def test_months_are_asked_about_and_what_is_left_out_is_named(
    page: Any, world: World, months: Path, tmp_path: Path, seen: Seen
) -> None:
    with serve(tmp_path / "new", "--backbone", str(world.weights), "--method", "lda") as address:
        page.goto(address)
        page.set_input_files("#teach-folder", months)
        asked = page.locator("#level-part")
        expect(asked).to_contain_text("“february” holds folders of its own (blue 🫐). Which are the classes?")
        expect(page.locator("#level-text")).to_be_focused()
        expect(page.locator("#lesson")).to_be_hidden()
        page.get_by_role("button", name="february and january").click()
        expect(page.locator("#lesson-count")).to_have_text("2 classes, 37 pictures")
        page.get_by_role("button", name="Remove all").click()

        page.set_input_files("#teach-folder", months)
        page.get_by_role("button", name="blue, blue 🫐, and red").click()
        expect(page.locator("#lesson-count")).to_have_text("3 classes, 37 pictures")
        expect(page.locator("#task-name")).to_be_focused()
        expect(page.locator("#task-name")).to_have_value("year")
        expect(page.locator("#teach-said-text")).to_have_text(
            "2 files are left out, being no pictures: film.mov and notes.txt."
        )
        page.get_by_role("button", name="Start teaching").click()
        expect(page.locator("#check-list")).to_contain_text("broken.png' is not an image", timeout=SLOW)
        expect(page.locator("#check-list")).to_contain_text("One picture with several labels")
        page.get_by_role("button", name="Teach it anyway").click()
        expect(page.get_by_role("heading", name="Learned")).to_be_visible(timeout=SLOW)
        expect(page.locator("#job-end")).to_contain_text("year: blue, blue 🫐, and red.")
        page.get_by_role("tab", name="Model").click()
        expect(page.locator("#tasks .task-facts")).to_contain_text("from 36 pictures")


def test_a_zip_of_months_and_another_choice(page: Any, place: Place, address: str, months: Path) -> None:
    path = months.with_suffix(".zip")
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(months.rglob("*.*")):
            archive.write(file, file.relative_to(months.parent))
    page.goto(f"{address}")
    page.get_by_role("tab", name="Teach").click()
    page.set_input_files("#teach-zip", path)
    expect(page.locator("#level-part")).to_contain_text("If not, choose a zip of one of them.")
    expect(page.locator("#level-inner")).to_be_hidden()
    page.set_input_files("#teach-folder", place.folder("blue"))  # who chooses something else has not answered
    expect(page.locator("#level-part")).to_be_hidden()
    expect(page.locator("#lesson-count")).to_have_text("1 class, 8 pictures")
    page.get_by_role("button", name="Remove all").click()
    page.set_input_files("#teach-zip", path)
    page.locator("#level-outer").click()
    expect(page.locator("#lesson-count")).to_have_text("2 classes, 37 pictures")
