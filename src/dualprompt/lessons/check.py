"""A look at labelled images before they are learned: what is left out, and what people would want to mend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dualprompt.data.doubts import Doubt, doubts
from dualprompt.data.folder import left_out, refuse_level
from dualprompt.data.looks import CHUNK, Looks
from dualprompt.errors import DualPromptError, one_line
from dualprompt.files import with_home
from dualprompt.lessons.task import FEWEST
from dualprompt.model.images import Data, ImageLike, gather, read_some
from dualprompt.progress import SILENT, Progress, Work, counted

SIDE = 224  # pixels, at which images are looked at without a learner
UNBALANCED = 10  # times as many images as the smallest class
NAMED = 20  # files that a summary names, of each kind
ALIKE = 4  # images of a group of copies that it names; and of groups, it names a quarter as many


class Seeing(Protocol):
    """What a learner must have to doubt labels: how it sees images, and their features."""

    @property
    def side(self) -> int:
        """Width and height of the images that it sees."""
        ...

    @property
    def interpolation(self) -> str:
        """How images are squeezed to a square."""
        ...

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """Return the features of images, (images, dim), from (images, side, side, 3) uint8."""
        ...


@dataclass(frozen=True)
class LeftOut:
    """A file that is not learned."""

    path: str
    reason: str


@dataclass(frozen=True)
class Labelled:
    """An image to look at, its class, and what it is called."""

    label: str
    name: str
    image: ImageLike


@dataclass(frozen=True)
class Copies:
    """Images that are copies of each other, as the network sees them."""

    images: tuple[str, ...]
    classes: tuple[str, ...]  # theirs; several: one picture with two labels
    exact: bool  # the same pixels; else they only look alike


@dataclass(frozen=True)
class Blurred:
    """An image that is far less sharp than most of the others."""

    image: str
    sharpness: float  # of the median of all


@dataclass(frozen=True)
class Doubted:
    """An image that the others take for another class."""

    image: str
    label: str
    instead: str
    margin: float  # by how much the other class scores higher; scores are about 0 to 1


@dataclass(frozen=True)
class Findings:
    """What a look at labelled images found."""

    classes: Mapping[str, int]  # images of each class that can be read
    left_out: tuple[LeftOut, ...]  # files that are no images, by name
    unreadable: tuple[LeftOut, ...]  # images that are damaged or too large: learning refuses them
    level: str | None  # why the folder seems to be the wrong one: learning refuses it
    copies: tuple[Copies, ...]
    blurred: tuple[Blurred, ...]
    doubted: tuple[Doubted, ...] | None  # None: nobody asked
    agreement: float | None  # percent of labels that the other images agree with

    @property
    def few(self) -> tuple[str, ...]:
        """The classes of which no image can be held out to measure the accuracy."""
        return tuple(name for name, images in self.classes.items() if images < FEWEST)

    @property
    def unbalanced(self) -> tuple[str, ...]:
        """The classes that have far fewer images than the largest one."""
        most = max(self.classes.values(), default=0)
        return tuple(name for name, images in self.classes.items() if images * UNBALANCED < most)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        derived = {"images": sum(self.classes.values()), "few": list(self.few), "unbalanced": list(self.unbalanced)}
        return {**asdict(self), "classes": dict(self.classes), **derived}

    def summary(self, most: int = NAMED) -> list[str]:
        """Return what was found as lines for people; of each kind, at most `most` are named."""
        return [*self._of_files(most), *self._of_classes(most), *self._of_images(most)]

    def of_more(self, most: int = NAMED) -> list[str]:
        """Return those lines that matter where the images are further ones of known classes."""
        return [*self._left_out(most), *self._of_images(most)]

    def _left_out(self, most: int) -> list[str]:
        return _some([f"left out: {each.path} ({each.reason})" for each in self.left_out], "left out", most)

    def _of_files(self, most: int) -> list[str]:
        lines = [] if self.level is None else [self.level]
        lines += self._left_out(most)
        return lines + _some([f"cannot be used: {each.reason}" for each in self.unreadable], "cannot be used", most)

    def _of_classes(self, most: int) -> list[str]:
        lines = []
        if len(self.classes) == 1:
            lines.append("there is one class alone: nothing to tell it from, unless the model knows others")
        if self.few:
            held = f"fewer than {FEWEST} images, too few to measure the accuracy well"
            lines.append(f"{held}: {_names(self.few, self.classes, most)}")
        if self.unbalanced:
            largest = max(self.classes, key=lambda name: self.classes[name])
            size = f"'{largest}' has {self.classes[largest]} images, more than {UNBALANCED} times those of"
            lines.append(f"{size} {_names(self.unbalanced, self.classes, most)}")
        return lines

    def _of_images(self, most: int) -> list[str]:
        across = [each for each in self.copies if len(each.classes) > 1]
        within = [each for each in self.copies if len(each.classes) == 1]
        lines = _some([f"one picture with several labels: {_alike(each)}" for each in across], "such pictures", most)
        if within:
            copied = sum(len(each.images) for each in within)
            lines.append(
                f"{copied} of {counted(sum(self.classes.values()), 'image')} have copies in their class: where images "
                "are judged by all others, copies are left out together"
            )
        lines += _some([_alike(each) for each in within], "groups of copies", max(1, most // ALIKE))
        blurred = [f"blurred: {each.image} ({each.sharpness:.1%} of the usual sharpness)" for each in self.blurred]
        lines += _some(blurred, "blurred", most)
        doubted = [f"doubted: {each.image}, the others say '{each.instead}'" for each in self.doubted or ()]
        return lines + _some(doubted, "doubted", most)


def _some(lines: Sequence[str], what: str, most: int) -> list[str]:
    """Return the first lines, each on one line, and how many more there are."""
    more = [f"… and {len(lines) - most} more {what}; `dualprompt check --json` names all"] if len(lines) > most else []
    return [*map(one_line, lines[:most]), *more]


def _names(names: Sequence[str], classes: Mapping[str, int], most: int) -> str:
    shown = ", ".join(f"'{name}' ({classes[name]})" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def _alike(found: Copies) -> str:
    more = f" and {len(found.images) - ALIKE} more" if len(found.images) > ALIKE else ""
    return f"{'the same' if found.exact else 'nearly the same'}: {' = '.join(found.images[:ALIKE])}{more}"


def check(data: Data, learner: Seeing | None = None, progress: Progress = SILENT) -> Findings:
    """Look at labelled images, as `ContinualLearner.learn` takes them; nothing is changed or kept.

    With a `learner`, each label is also doubted by the other images, from its backbone's frozen features: that takes
    one pass over them. `progress` shows how far it is.
    """
    classes = gather(data)
    labelled = _labelled(classes)
    side, interpolation = (SIDE, "bilinear") if learner is None else (learner.side, learner.interpolation)
    faults: list[LeftOut] = []
    good: list[Labelled] = []
    looks: list[Looks] = []
    features: list[np.ndarray] = []
    kind = "reading" if learner is None else "features"
    with progress.bar(Work(kind, len(labelled), "img")) as bar:
        for start in range(0, len(labelled), CHUNK):
            part = labelled[start : start + CHUNK]
            pixels, bad = read_some([each.image for each in part], side, interpolation)
            faults += [LeftOut(part[row].name, reason) for row, reason in bad.items()]
            rows = [row for row in range(len(part)) if row not in bad]
            good += [part[row] for row in rows]
            looks.append(Looks.of(pixels[rows]))
            if learner is not None and rows:
                features.append(learner.features(pixels[rows]))
            bar.advance(len(part))
    return _findings(data, classes, good, Looks.joined(looks), np.concatenate(features) if features else None, faults)


def look(data: Data, classes: Mapping[str, Sequence[ImageLike]], looks: Looks) -> Findings:
    """Return what `looks` at images find that were read already, class by class."""
    return _findings(data, classes, _labelled(classes), looks, None, [])


def _findings(
    data: Data,
    classes: Mapping[str, Any],
    good: Sequence[Labelled],
    looks: Looks,
    features: np.ndarray | None,
    faults: Sequence[LeftOut],
) -> Findings:
    """Return what was found.

    `data` and its `classes` are what was given; `good` are the images that could be read, with their labels, and
    `looks` and `features` are theirs; `faults` are the other images.
    """
    names = list(classes)
    number = {name: n for n, name in enumerate(names)}
    labels = np.array([number[each.label] for each in good], np.int64)
    doubted, agreement = (None, None) if features is None else doubts(features, labels)
    found = [
        Copies(tuple(good[row].name for row in rows), tuple(dict.fromkeys(good[row].label for row in rows)), exact)
        for rows, exact in looks.copies
    ]
    folder = with_home(data) if isinstance(data, str | Path) else None
    others = {} if folder is None else left_out(folder)
    return Findings(
        classes=dict(zip(names, np.bincount(labels, minlength=len(names)).tolist(), strict=True)),
        left_out=tuple(LeftOut(str(path), reason) for path, reason in others.items()),
        unreadable=tuple(faults),
        level=None if folder is None else _level(folder),
        copies=tuple(sorted(found, key=lambda each: len(each.classes) == 1)),
        blurred=tuple(Blurred(good[row].name, share) for row, share in looks.blurred().items()),
        doubted=None if doubted is None else tuple(_doubted(good[each.row], names, each) for each in doubted),
        agreement=agreement,
    )


def _doubted(image: Labelled, names: Sequence[str], found: Doubt) -> Doubted:
    return Doubted(image.name, image.label, names[found.instead], found.margin)


def _level(folder: Path) -> str | None:
    try:
        refuse_level(folder)
    except DualPromptError as error:
        return str(error)
    return None


def _labelled(classes: Mapping[str, Sequence[ImageLike]]) -> list[Labelled]:
    return [
        Labelled(label, str(image) if isinstance(image, str | Path) else f"image {n} of '{label}'", image)
        for label, own in classes.items()
        for n, image in enumerate(own, start=1)
    ]
