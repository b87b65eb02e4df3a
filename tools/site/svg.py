"""A drawing as SVG text: boxes, arrows and words in a few named colours, readable on light and on dark pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.sax.saxutils import escape

# Of each kind of thing: fill, line and text, in light and in dark colours.
LIGHT = {
    "frozen": ("#e9ecef", "#868e96", "#212529"),
    "shared": ("#d0ebff", "#1c7ed6", "#0b3d66"),
    "own": ("#ffe8cc", "#e8590c", "#7a2e00"),
    "good": ("#d3f9d8", "#2f9e44", "#14451f"),
    "plain": ("#ffffff", "#adb5bd", "#212529"),
}
DARK = {
    "frozen": ("#343a40", "#868e96", "#f1f3f5"),
    "shared": ("#123a5c", "#4dabf7", "#d0ebff"),
    "own": ("#5c2d0c", "#ff922b", "#ffe8cc"),
    "good": ("#1b4324", "#51cf66", "#d3f9d8"),
    "plain": ("#212529", "#6c757d", "#f1f3f5"),
}
PAPER = {"light": ("#ffffff", "#212529", "#5c636a"), "dark": ("#16181b", "#f1f3f5", "#adb5bd")}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def _colours(kinds: dict[str, tuple[str, str, str]], paper: tuple[str, str, str]) -> str:
    background, ink, quiet = paper
    rules = [
        f".paper{{fill:{background}}}",
        f"text{{fill:{ink}}}",
        f".quiet{{fill:{quiet}}}",
        f".line{{stroke:{quiet}}}",
        f".tip{{fill:{quiet}}}",
    ]
    for name, (fill, line, text) in kinds.items():
        rules += [
            f".{name}{{fill:{fill};stroke:{line}}}",
            f".on-{name}{{fill:{text}}}",
            f".line-{name}{{stroke:{line}}}",
        ]
        rules.append(f".tip-{name}{{fill:{line}}}")
    return "".join(rules)


STYLE = (
    f"text{{font-family:{FONT};font-size:14px}}.small{{font-size:12px}}.bold{{font-weight:600}}"
    "rect,circle{stroke-width:1.5}.line{fill:none;stroke-width:1.5}.paper{stroke:none}"
    f"{_colours(LIGHT, PAPER['light'])}@media (prefers-color-scheme:dark){{{_colours(DARK, PAPER['dark'])}}}"
)


@dataclass
class Drawing:
    """What is drawn so far; all lengths are pixels."""

    width: int
    height: int
    title: str  # read to those who do not see it
    parts: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, text: str = "", small: bool = False
    ) -> None:
        """Draw a box with words in its middle, a line each."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>')
        lines = text.split("\n") if text else []
        step = 15 if small else 17
        for number, line in enumerate(lines):
            offset = (number - (len(lines) - 1) / 2) * step
            self.words(x + width / 2, y + height / 2 + offset + 5, line, "middle", f"on-{kind}" + small * " small")

    def words(self, x: float, y: float, text: str, anchor: str = "start", look: str = "") -> None:
        """Write words at a place."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{look}">{escape(text)}</text>')

    def arrow(self, points: list[tuple[float, float]], kind: str = "") -> None:
        """Draw a line through points, with a tip at its end."""
        name = f"-{kind}" if kind else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" class="line line{name}"/>')
        (x0, y0), (x, y) = points[-2:]
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        dx, dy = (x - x0) / length, (y - y0) / length
        corners = [(x, y), (x - 8 * dx - 4 * dy, y - 8 * dy + 4 * dx), (x - 8 * dx + 4 * dy, y - 8 * dy - 4 * dx)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
        self.parts.append(f'<polygon points="{path}" class="tip{name}"/>')

    def line(self, x0: float, y0: float, x1: float, y1: float, kind: str = "") -> None:
        """Draw a straight line."""
        name = f" line-{kind}" if kind else ""
        self.parts.append(f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" class="line{name}"/>')

    def svg(self) -> str:
        """Return the drawing as a file's text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">'
        )
        paper = f'<rect width="{self.width}" height="{self.height}" rx="8" class="paper"/>'
        return "\n".join(
            [head, f"<title>{escape(self.title)}</title>", f"<style>{STYLE}</style>", paper, *self.parts, "</svg>", ""]
        )
