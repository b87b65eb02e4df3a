"""What a picture is: plain data that is drawn with matplotlib, and kept as CSV and JSON."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST_NAME = 1000  # letters of a name that is read from a file
TICK, LABEL = 24, 60  # letters of a name that are drawn: longer ones would leave the picture no room
COLOUR_MAPS = ("YlGnBu", "RdBu_r")
MARKERS = ("o", "x")
LEGEND_COLUMNS = 5
CELLS = 25  # above so many rows or columns a cell has no room for its number
LEAST = (
    5.0  # points of a percentage that an axis spans at least, and the half of what colours span: less is often noise
)
INK, QUIET = "#1f2933", "#9aa5b1"
ON_COLOUR = "#1e2832"  # text on a light cell, which stays dark where paper is dark
PAPER = "#fffffe"
COLOURS = ("#0b6e99", "#d9480f", "#2b8a3e", "#862e9c", "#b8860b", "#c2255c", "#5c940d", "#495057")


@dataclass(frozen=True)
class Grid:
    """A heat map with the numbers in its cells."""

    title: str
    x: str
    y: str
    columns: list[str]
    rows: list[str]
    values: list[list[float | None]]  # row by row; None leaves a cell empty
    unit: str = "accuracy (%)"
    low: float | None = 0
    high: float | None = 100
    digits: int = 0
    colours: str = "YlGnBu"
    framed: list[list[int]] = field(default_factory=list)  # (row, column) of cells that stand out
    spread: list[list[float | None]] | None = None  # what stands behind ± in each cell
    kind: ClassVar[str] = "grid"

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches."""
        names = 0.07 * max(min(len(name), TICK) for name in self.rows)
        return 1.5 + names + 0.52 * min(len(self.columns), CELLS), 1.5 + 0.42 * min(len(self.rows), CELLS)

    def data(self) -> list[dict[str, Any]]:
        """Return the numbers, a row for each cell."""
        return [
            {self.y: self.rows[i], self.x: self.columns[j], self.unit: value}
            | ({} if self.spread is None else {"spread": self.spread[i][j]})
            for i, values in enumerate(self.values)
            for j, value in enumerate(values)
            if value is not None
        ]

    def _range(self, values: np.ndarray) -> tuple[float, float]:
        """Return the values of the first and the last colour; where they are open, noise must not fill the scale."""
        low = float(np.nanmin(values)) if self.low is None else self.low
        high = float(np.nanmax(values)) if self.high is None else self.high
        low, high = min(low, high), max(low, high)  # a file from elsewhere may have them the other way round
        noise = [each for row in self.spread or () for each in row if each is not None]
        lacking = max(2 * LEAST, 4 * max(noise, default=0.0)) - (high - low)
        if lacking > 0 and self.unit.endswith("(%)"):
            low -= lacking / 2 if self.low is None else 0
            high += lacking / 2 if self.high is None else 0
        return low, high

    def draw(self, ax: Axes) -> None:
        """Draw the cells, and their numbers where there is room."""
        values = np.array(self.values, dtype=float)
        low, high = self._range(values)
        picture = ax.imshow(
            values, cmap=self.colours, vmin=low, vmax=high, aspect="auto", interpolation="none", alpha=0.95
        )
        if max(values.shape) <= CELLS:
            for (row, column), value in np.ndenumerate(values):
                if np.isfinite(value):
                    red, green, blue, _ = picture.to_rgba(value)
                    dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.55
                    colour = "white" if dark else ON_COLOUR
                    around = None if self.spread is None else self.spread[row][column]
                    lift = 0 if around is None else 0.14
                    style: dict[str, Any] = {"ha": "center", "va": "center", "color": colour}
                    ax.text(column, row - lift, signed(f"{value:.{self.digits}f}"), fontsize=8.5, **style)
                    if around is not None:
                        ax.text(column, row + 0.24, f"± {around:.{self.digits}f}", fontsize=6.5, **style)
        else:
            bar = ax.figure.colorbar(picture, ax=ax, label=shortened(self.unit, LABEL), shrink=0.9)
            if bar.solids is not None:
                bar.solids.set_rasterized(True)  # 256 steps of colour are one picture, not 256 shapes
        from matplotlib.patches import Rectangle

        for row, column in self.framed:
            ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="#d9480f", linewidth=2.2))
        for axis, names in ((ax.xaxis, self.columns), (ax.yaxis, self.rows)):
            places = range(0, len(names), -(-len(names) // 20))
            axis.set_ticks(list(places), [shortened(names[i]) for i in places], parse_math=False)
        for side in ax.spines.values():
            side.set_visible(False)
        ax.tick_params(length=0)


@dataclass(frozen=True)
class Map:
    """A heat map of counts without numbers, for many rows and columns; colours tell few from none."""

    title: str
    x: str
    y: str
    columns: list[str]
    rows: list[str]
    values: list[list[int]]  # row by row; 0 is left white
    unit: str = "images"
    rules: list[int] = field(default_factory=list)  # columns before which a dashed line stands
    kind: ClassVar[str] = "map"

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches."""
        names = 0.07 * max(min(len(name), TICK) for name in self.rows)
        across = min(0.5 * len(self.columns), 2 + 0.06 * min(len(self.columns), 50))
        return 2.6 + names + across, 1.8 + 0.2 * min(len(self.rows), 22)

    def data(self) -> list[dict[str, Any]]:
        """Return the numbers, a row for each cell that is not empty."""
        cells = [(i, j, n) for i, counts in enumerate(self.values) for j, n in enumerate(counts) if n]
        return [{self.y: self.rows[i], self.x: self.columns[j], self.unit: n} for i, j, n in cells]

    def draw(self, ax: Axes) -> None:
        """Draw the cells; a colour stands for a power of the number, so that a single image is seen beside hundreds."""
        from matplotlib import colormaps
        from matplotlib.colors import ListedColormap, PowerNorm

        values = np.array(self.values, dtype=float)
        norm = PowerNorm(0.4, vmin=0, vmax=max(1.0, values.max()))
        seen = ListedColormap(colormaps["YlGnBu"](np.linspace(0.2, 0.75, 256)))  # on white paper and on black
        picture = ax.imshow(
            np.where(values > 0, values, np.nan), cmap=seen, norm=norm, aspect="auto", interpolation="none"
        )
        bar = ax.figure.colorbar(picture, ax=ax, label=shortened(self.unit, LABEL), shrink=0.9)
        if bar.solids is not None:
            bar.solids.set_rasterized(True)
        for column in self.rules:
            ax.axvline(column - 0.5, color="#d9480f", linestyle=(0, (4, 3)), linewidth=1.1)
        for axis, names, most in ((ax.xaxis, self.columns, 10), (ax.yaxis, self.rows, 22)):
            places = range(0, len(names), -(-len(names) // most))
            axis.set_ticks(list(places), [shortened(names[i]) for i in places], parse_math=False)
        if max(map(len, self.columns)) > 4:
            ax.tick_params(axis="x", labelrotation=35)
            for text in ax.get_xticklabels():
                text.set_horizontalalignment("right")
        ax.tick_params(length=0)


@dataclass(frozen=True)
class Line:
    """One line of a picture, with bars of ± `spread` at its points where that is known."""

    name: str
    x: list[float]
    y: list[float]
    spread: list[float | None] | None = None
    level: bool = False  # a dashed line over the whole width, for what does not depend on x


@dataclass(frozen=True)
class Lines:
    """Curves over numbers or over named places."""

    title: str
    x: str
    y: str
    lines: list[Line]
    places: list[str] | None = None  # names of x = 0, 1, 2, …
    mark_best: bool = False
    joined: bool = True  # False: there is nothing between two places
    whole: bool = True  # x counts something: ticks are the values themselves
    kind: ClassVar[str] = "lines"

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches."""
        return 4.6, 3.4 + (0.19 * -(-len(self.lines) // self._columns) if self._below else 0)

    @property
    def _below(self) -> bool:
        """Whether the legend stands below: the search for a free corner sees neither bars nor levels."""
        return len(self.lines) > 4 or any(line.level or line.spread is not None for line in self.lines)

    @property
    def _columns(self) -> int:
        """How many names a line of the legend has room for."""
        longest = max(min(len(line.name), LABEL) for line in self.lines)
        return max(1, min(3, len(self.lines), int(4.4 / (0.45 + 0.075 * longest))))

    def data(self) -> list[dict[str, Any]]:
        """Return the numbers, a row for each point."""
        names = self.places or []
        return [
            {
                "line": line.name,
                self.x: names[int(x)] if names else x,
                self.y: y,
                "spread": None if line.spread is None else line.spread[i],
            }
            for line in self.lines
            for i, (x, y) in enumerate(zip(line.x, line.y, strict=True))
        ]

    def draw(self, ax: Axes) -> None:
        """Draw the lines and their bars; those of several lines stand beside each other."""
        for number, line in enumerate(self.lines):
            colour, name = COLOURS[number % len(COLOURS)], shortened(line.name, LABEL)
            y, spread = np.array(line.y), None if line.spread is None else np.array(line.spread, dtype=float)
            if line.level:
                ax.axhline(line.y[0], color=colour, linestyle=(0, (5, 2)), linewidth=1.6, label=name)
                if spread is not None:
                    ax.axhspan(y[0] - spread[0], y[0] + spread[0], color=colour, alpha=0.12, linewidth=0)
                continue
            width = 1.6 if self.joined else 0
            ax.plot(line.x, line.y, marker="o", markersize=4, linewidth=width, color=colour, label=name)
            if spread is not None:
                aside = min(0.05, 0.3 / len(self.lines)) * (number - (len(self.lines) - 1) / 2)
                bars = {"ecolor": colour, "elinewidth": 1.0, "capsize": 2.5, "alpha": 0.8}
                ax.errorbar(np.array(line.x) + aside, y, np.where(spread > 0, spread, np.nan), fmt="none", **bars)
            best = int(y.argmax())
            if self.mark_best and (y.round(2) == y[best].round(2)).sum() == 1:  # equals have no winner
                ax.plot(line.x[best], y[best], marker="o", markersize=10, markerfacecolor="none", color=colour)
        if self.y.endswith("(%)"):
            low, high = ax.get_ylim()
            lacking = max(0.0, LEAST - (high - low)) / 2
            ax.set_ylim(low - lacking, min(high + lacking, 102))  # no share is above 100 %, but bars may be
        ticks = sorted({x for line in self.lines if not line.level for x in line.x})
        if self.places:
            names = [shortened(place) for place in self.places]
            ax.set_xticks(range(len(names)), names, rotation=35 if len(names) > 6 else 0, ha="center")
        elif self.whole and ticks:
            ax.set_xticks(ticks[:: -(-len(ticks) // 20)])
        ax.grid(axis="y", color=QUIET, alpha=0.3)
        if len(self.lines) > 1 or self.lines[0].name:
            place = (
                {"loc": "upper center", "bbox_to_anchor": (0.45, -0.2), "ncols": self._columns} if self._below else {}
            )
            legend = ax.legend(frameon=False, fontsize=8.5, **place)
            for text in legend.get_texts():
                text.set_parse_math(False)


@dataclass(frozen=True)
class Cloud:
    """Points that belong together."""

    name: str
    x: list[float]
    y: list[float]
    colour: int
    marker: str = "o"


@dataclass(frozen=True)
class Points:
    """Points in a plane without units."""

    title: str
    clouds: list[Cloud]
    kind: ClassVar[str] = "points"

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches: below the plane is room for a legend."""
        return 4.6, 4.0 + 0.19 * -(-len(self._legend()) // LEGEND_COLUMNS)

    def data(self) -> list[dict[str, Any]]:
        """Return the points."""
        return [
            {"group": cloud.name, "x": x, "y": y}
            for cloud in self.clouds
            for x, y in zip(cloud.x, cloud.y, strict=True)
        ]

    def draw(self, ax: Axes) -> None:
        """Draw the points, a colour and marker for each group."""
        import matplotlib
        from matplotlib.lines import Line2D

        most = max(cloud.colour for cloud in self.clouds) or 1

        def shade(colour: int) -> Any:
            return matplotlib.colormaps["tab10"](colour) if most < 10 else matplotlib.colormaps["turbo"](colour / most)

        for cloud in self.clouds:
            ax.plot(
                cloud.x, cloud.y, cloud.marker, color=shade(cloud.colour), markersize=3.6, markeredgewidth=0.8
            )  # fmt: skip
        ax.set_xticks([])
        ax.set_yticks([])
        for side in ax.spines.values():
            side.set_color(QUIET)
            side.set_visible(True)
        handles = [
            Line2D([], [], color=colour if isinstance(colour, str) else shade(colour), marker=marker, linestyle="",
                   markersize=4.5, markeredgewidth=0.8, label=shortened(name, LABEL))
            for name, colour, marker in self._legend()
        ]  # fmt: skip
        legend = ax.legend(
            handles=handles, frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, 0.0),
            ncols=min(LEGEND_COLUMNS, len(handles)), handletextpad=0.1, columnspacing=0.8,
        )  # fmt: skip
        for text in legend.get_texts():
            text.set_parse_math(False)

    def _legend(self) -> list[tuple[str, int | str, str]]:
        """Return names with their colours and markers.

        Where names are KIND, GROUP, with a marker for each kind and a colour for each group, they are told apart.
        """
        parts = [(*cloud.name.partition(", ")[::2], cloud) for cloud in self.clouds]
        kinds = {(kind, cloud.marker) for kind, _, cloud in parts}
        groups = {(group, cloud.colour) for _, group, cloud in parts}
        apart = len(kinds) == len({kind for kind, _ in kinds}) and len(groups) == len({group for group, _ in groups})
        if not apart or not all(group for _, group, _ in parts):
            return [(cloud.name, cloud.colour, cloud.marker) for cloud in self.clouds]
        told: dict[tuple[str, int | str, str], None] = dict.fromkeys(
            (kind, INK, cloud.marker) for kind, _, cloud in parts
        )
        return list(told | dict.fromkeys((group, cloud.colour, "s") for _, group, cloud in parts))


Picture = Grid | Map | Lines | Points


def whole(picture: Grid | Lines | Points) -> Picture:
    """Return a picture that can be drawn; a ValueError says why one cannot."""
    for name in (picture.title, *_names_in(picture)):
        if len(name) > LONGEST_NAME:
            raise ValueError(f"a name has more than {LONGEST_NAME} letters")
    if isinstance(picture, Grid):
        shape = len(picture.rows), len(picture.columns)
        for values in (picture.values, *([] if picture.spread is None else [picture.spread])):
            if not all(shape) or (len(values), *{len(row) for row in values}) != shape:
                raise ValueError("a grid has a number for each row and column")
        if all(value is None for row in picture.values for value in row):
            raise ValueError("a grid has a number in one cell at least")
        if not 0 <= picture.digits <= 6 or picture.colours not in COLOUR_MAPS:
            raise ValueError(f"a grid has 0 to 6 digits, and the colours {' or '.join(COLOUR_MAPS)}")
        if any(len(cell) != 2 or not (0 <= cell[0] < shape[0] and 0 <= cell[1] < shape[1]) for cell in picture.framed):
            raise ValueError("a framed cell is a row and a column of its grid")
        return picture
    parts = picture.lines if isinstance(picture, Lines) else picture.clouds
    if not parts or any(not part.x or len(part.x) != len(part.y) for part in parts):
        raise ValueError("a line or cloud has points, each with an x and a y")
    if isinstance(picture, Lines):
        if any(line.spread is not None and len(line.spread) != len(line.x) for line in picture.lines):
            raise ValueError("a line's spread is that of its points")
        last = None if picture.places is None else len(picture.places)
        if last is not None and any(not 0 <= x < last for line in picture.lines for x in line.x):
            raise ValueError("a point lies at one of its picture's places")
    elif any(cloud.marker not in MARKERS or not 0 <= cloud.colour < 10**6 for cloud in picture.clouds):
        raise ValueError(f"a cloud has a colour, and the marker {' or '.join(MARKERS)}")
    return picture


def _names_in(picture: Grid | Lines | Points) -> list[str]:
    if isinstance(picture, Grid):
        return [picture.x, picture.y, picture.unit, *picture.rows, *picture.columns]
    if isinstance(picture, Lines):
        return [picture.x, picture.y, *(line.name for line in picture.lines), *(picture.places or ())]
    return [cloud.name for cloud in picture.clouds]


def as_plain(picture: Picture) -> dict[str, Any]:
    """Return a picture as JSON keeps it."""
    return {"kind": picture.kind, **asdict(picture)}


def signed(text: str) -> str:
    """Return a text with minus signs before its negative numbers, where hyphens stood."""
    return re.sub(r"(?<![\w.\-–—])-(?=\d)", "−", text)


def shortened(name: str, most: int = TICK) -> str:
    """Return as much of a name as there is room for."""
    return name if len(name) <= most else f"{name[: most - 1]}…"
