"""Checks the links of the built site: `python -m tools.site.links docs/_build/html`.

A link into the site must lead to a file, and to a place in it. One that leads elsewhere is not followed, for that needs
a network; it must be https and name a host.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

NO_PAGE = ("mailto", "data", "javascript")


class Page(HTMLParser):
    """The links of a page, and the places that links may lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of links, pictures and names."""
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.append(value)
            elif value and name in ("id", "name"):
                self.places.add(value)


def faults(site: Path) -> list[str]:
    """Return what is wrong with the links of a site, a line each."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            fault = _fault(path, link, pages)
            if fault:
                found.append(f"{path.relative_to(site)}: {link[:120]} {fault}")
    return found


def _fault(page: Path, link: str, pages: dict[Path, Page]) -> str | None:
    """Return what is wrong with a link, if anything."""
    try:
        parts = urlsplit(link)
    except ValueError as error:
        return f"is no address ({error})"
    if parts.scheme in NO_PAGE:
        return None
    if parts.scheme or parts.netloc:
        right = parts.scheme == "https" and "." in parts.netloc and not set(link) & set(" \\")
        return None if right else "should be https, with a host"
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page.resolve()
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return "leads to no file"
    known = pages.get(target)
    if parts.fragment and known is not None and unquote(parts.fragment) not in known.places:
        return "leads to no place of that page"
    return None


def main() -> int:
    """Print what is wrong; return 1 if anything is."""
    site = Path(sys.argv[1]).resolve()
    wrong = faults(site)
    sys.stdout.writelines(f"{line}\n" for line in wrong)
    sys.stdout.write(f"{len(wrong)} wrong links in {site}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
