"""Photographs a report for the docs: `python -m tools.report_pictures REPORT.html OUT`; needs Chromium and playwright.

Its beginning at 1280 and at 390 pixels, on light and on dark paper.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

SIZES = {"desktop": (1280, 1500), "phone": (390, 1500)}
COLOURS = 128  # of a picture, which is then small


def photograph(report: Path, out: Path) -> list[Path]:
    """Write report-SIZE-SCHEME.png for each size and colour scheme; return them."""
    out.mkdir(parents=True, exist_ok=True)
    found = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for size, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
                page.goto(report.resolve().as_uri())
                path = out / f"report-{size}-{scheme}.png"
                page.screenshot(path=path)
                page.close()
                with Image.open(path) as picture:
                    picture.convert("RGB").quantize(COLOURS).save(path, optimize=True)
                found.append(path)
        browser.close()
    return found


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    for made in photograph(Path(sys.argv[1]), Path(sys.argv[2])):
        sys.stdout.write(f"{made}\n")
