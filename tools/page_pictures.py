"""Photographs the page for the docs: `python -m tools.page_pictures OUT`; needs Chromium and playwright.

A new model is taught pieces of fruit that come with the package (Fruits-360, MIT, © 2017–2020 Mihai Oltean and Horea
Muresan), asked, corrected and tested, at 1280 and at 390 pixels.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import expect, sync_playwright

from dualprompt.data.datasets.mini import FILE, SHA256
from dualprompt.files import packaged

CLASSES = ("apple-golden", "nectarine", "orange", "peach", "pear", "plum")
COUNTS = {"train": 12, "test": 4}
WAIT = 240_000  # milliseconds
COLOURS = 128  # of a picture, which is then small


def write_pictures(folder: Path) -> None:
    """Write some pictures of fruit, as folder/SPLIT/CLASS/NUMBER."""
    seen: dict[tuple[str, str], int] = {}
    with zipfile.ZipFile(packaged(FILE, SHA256)) as pack:
        for name in pack.namelist():
            domain, split, label, file = name.split("/")
            number = seen[split, label] = seen.get((split, label), 0) + 1
            if domain == "fruit" and label in CLASSES and number <= COUNTS[split]:
                path = folder / split / label / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(pack.read(name))


def photograph(page: Any, path: Path, full: bool = True) -> None:
    """Keep what the page shows, in few colours."""
    page.wait_for_timeout(400)
    page.screenshot(path=path, full_page=full)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(COLOURS).save(path, optimize=True)


def walk(page: Any, address: str, pictures: Path, out: Path) -> None:
    """Teach, ask, correct and test, and keep a picture of each."""
    page.goto(address)
    shutil.copytree(pictures / "train", pictures / "Fruit", dirs_exist_ok=True)
    page.set_input_files("#teach-folder", pictures / "Fruit")
    photograph(page, out / "page-teach.png")
    page.get_by_role("button", name="Start teaching").click()
    learned, anyway = page.get_by_role("heading", name="Learned"), page.get_by_role("button", name="Teach it anyway")
    expect(learned.or_(anyway)).to_be_visible(timeout=WAIT)
    if anyway.is_visible():
        photograph(page, out / "page-check.png")
        anyway.click()
    expect(learned).to_be_visible(timeout=WAIT)
    page.get_by_role("link", name="Classify pictures").click()
    page.set_input_files("#classify-files", [sorted((pictures / "test" / name).iterdir())[1] for name in CLASSES[1:5]])
    expect(page.locator("#results > [aria-busy]")).to_have_count(0, timeout=WAIT)
    page.locator("#results > li").nth(1).get_by_role("button", name=re.compile("^Wrong")).click()
    photograph(page, out / "page-desktop.png")
    page.get_by_role("tab", name="Model").click()
    page.set_input_files("#test-folder", pictures / "test")
    expect(page.locator("#confusion-words")).to_contain_text("Your pictures", timeout=WAIT)
    photograph(page, out / "page-model.png")
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme="dark")
    page.get_by_role("button", name="Change the class orange").click()
    photograph(page, out / "page-class-phone.png", full=False)
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Classify").click()
    photograph(page, out / "page-phone.png", full=False)


def main() -> int:
    """Serve a new model, drive the page, keep pictures."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        pictures = Path(folder) / "pictures"
        write_pictures(pictures)
        command = [sys.executable, "-m", "dualprompt.cli", "serve", f"{folder}/model", "--port", "0", "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        text = ""
        while not text.endswith("}\n"):
            text += process.stdout.readline() or sys.exit("the server did not start")
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900}, locale="en-GB")
        page.set_default_timeout(60_000)
        try:
            walk(page, json.loads(text)["page"], pictures, out)
        finally:
            browser.close()
            process.terminate()
            process.wait(30)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
