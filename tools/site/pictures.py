"""Photographs the built site, to be looked at: `python -m tools.site.pictures OUT [PAGE …]`.

Needs Chromium and playwright, and the site (`make docs`). Each page is taken at 1280 pixels in light colours and at 390
in dark ones; with `--all`, at both widths in both.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import sync_playwright

SITE = Path(__file__).parents[2] / "docs" / "_build" / "html"
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
Scheme = Literal["light", "dark"]
USUAL: list[tuple[str, Scheme]] = [("desktop", "light"), ("phone", "dark")]
EVERY: list[tuple[str, Scheme]] = [*USUAL, ("desktop", "dark"), ("phone", "light")]
COLOURS = 128  # of a picture, which is then small


def main() -> int:
    """Open pages and keep what is seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the pictures")
    parser.add_argument("pages", nargs="*", default=["index"], help="pages, without .html (default: index)")
    parser.add_argument("--all", action="store_true", help="both widths in both colours")
    parser.add_argument("--full", action="store_true", help="whole pages, not only what fits the window")
    options = parser.parse_intermixed_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, scheme in EVERY if options.all else USUAL:
            width, height = WIDTHS[name]
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            for place in options.pages:
                page.goto((SITE / f"{place}.html").as_uri())
                suffix = f"-{scheme}" if options.all else ""
                path = options.out / f"site-{place.replace('/', '-')}-{name}{suffix}.png"
                page.screenshot(path=path, full_page=options.full)
                with Image.open(path) as picture:
                    picture.convert("RGB").quantize(COLOURS).save(path, optimize=True)
                wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                if wide > 0:
                    raise SystemExit(f"{place} is {wide} pixels wider than a window of {width}")
        browser.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
