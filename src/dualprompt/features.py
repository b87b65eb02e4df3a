"""Frozen features of a benchmark's images in the fixed view: computed once for each image, whoever asks for them.

They are computed in parts of an order that neither seed nor method decides. So an image has the same neighbours in
every run, and its feature the same bits. Parts lie in the cache, named by all that decides them: other processes find
them there, and those that need the same parts at the same time share the work.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dualprompt.backbones.base import Backbone
from dualprompt.backbones.weights import CheckpointInfo, drawn
from dualprompt.config import RunConfig
from dualprompt.data.images import Images
from dualprompt.data.stream import Stream, Subset
from dualprompt.data.views import View
from dualprompt.errors import DualPromptError
from dualprompt.files import cache_root, digest, held
from dualprompt.progress import Bar, Progress, Work
from dualprompt.run.checkpoint import read_tensors, write
from dualprompt.run.code import of_module

if TYPE_CHECKING:
    from lightning_fabric import Fabric

FORMAT = 1  # part of a name in the cache: raise it when what a part holds changes
PART = 2048  # images of a part, about: whole batches
PATIENCE = 600.0  # seconds to wait for another process that computes a part, before doing it oneself
MOST = "DUALPROMPT_FEATURES_GB"
USUAL_MOST = "4"
FILE = "features.safetensors"
COMPUTED_BY = "dualprompt.training.feed"  # whose code, with all that it imports, decides features
_TABLE = re.compile("[0-9a-f]{64}")  # the name of a table's folder: what is called otherwise is not ours
_BUSY = "another process computes these features"

Compute = Callable[[Tensor], Tensor]
"""Returns the features of the images at some rows, (rows, dim), on the device that computes."""


class Viewer(Protocol):
    """What looks at images through a frozen backbone: a Feed."""

    fabric: Fabric
    progress: Progress
    dtype: torch.dtype
    pause: Callable[[], None]

    @property
    def backbone(self) -> Backbone:
        """The frozen backbone."""
        ...

    def computing(self, images: Images, most: int, bar: Bar) -> Compute:
        """Return what computes features of these images, of at most so many at a time."""
        ...


class Shelf:
    """The parts of one table on disk. It may fail or be full: then parts are computed where they are needed."""

    def __init__(self, name: str) -> None:
        self.root, self.most = cache_root() / "features", _most_bytes()
        self.folder = self.root / name
        self.complaint = ""  # why nothing can be kept

    def take(self, part: int, like: Tensor) -> Tensor | None:
        """Return a part as it was put there; None if it is not there, or not whole."""
        path = self._place(part) / FILE
        try:
            found = read_tensors(path)[0].get("features")
        except DualPromptError:
            return None
        if found is None or (found.shape, found.dtype) != (like.shape, like.dtype) or not bool(found.isfinite().all()):
            return None
        with contextlib.suppress(OSError):
            os.utime(self.folder)  # it was used
        return found

    def put(self, part: int, values: Tensor) -> None:
        """Keep a part, at the cost of tables that were not used for long."""
        try:
            if not self.complaint and self._make_room(values.nbytes):
                write(self._place(part) / FILE, {"features": values}, {})
        except (OSError, DualPromptError) as error:
            self.complaint = str(error)

    @contextlib.contextmanager
    def claimed(self, part: int) -> Iterator[bool]:
        """Keep other processes from computing a part; yield whether nobody else does."""
        with contextlib.ExitStack() as stack:
            mine = True
            try:
                self._place(part).mkdir(parents=True, exist_ok=True)
                stack.enter_context(held(self._place(part), _BUSY))
            except DualPromptError as error:
                mine = str(error) != _BUSY
            except OSError:  # no such folder can be had, so nobody else has it either
                pass
            yield mine

    def _place(self, part: int) -> Path:
        return self.folder / f"{part:05d}"

    def _make_room(self, size: int) -> bool:
        """Remove the tables that were not used for longest until there is room; return whether there is."""
        dates, sizes = {}, {}
        for folder in self.root.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process makes room too
                if _TABLE.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
                    sizes[folder] = sum(path.lstat().st_size for path in folder.glob(f"*/{FILE}"))
                    dates[folder] = folder.stat().st_mtime
        own = sizes.pop(self.folder, 0)
        for oldest in sorted(sizes, key=lambda each: dates[each]):
            if own + sum(sizes.values()) + size > self.most >= own + size:
                shutil.rmtree(oldest, ignore_errors=True)
                del sizes[oldest]
        return own + sum(sizes.values()) + size <= self.most


def _most_bytes() -> int:
    text = os.environ.get(MOST, USUAL_MOST)
    try:
        return max(0, round(float(text) * 2**30))
    except (ValueError, OverflowError):
        raise DualPromptError(f"${MOST} says how many GB of features are kept on disk; found '{text}'") from None


class Table:
    """The features of some images of one kind of pixels, in parts that are computed or found when they are needed."""

    def __init__(self, images: Images, rows: Tensor, size: int, name: Sequence[Any] | None) -> None:
        """Make a table of nothing.

        Args:
            images: what is looked at.
            rows: which of them, in the order in which they are computed.
            size: how many of them a part has.
            name: all that decides the features; None: that is not known, so they are kept in memory alone.
        """
        self.images, self.rows, self.size = images, rows, size
        self.name = None if name is None else [FORMAT, *name, size, digest(rows.tolist())]
        self.place = torch.full((len(images),), -1)
        self.place[rows] = torch.arange(len(rows))
        self.threads = torch.get_num_threads()
        self.values: Tensor | None = None
        self.told = False  # why it is not kept on disk
        self.missing = set(range(-(-len(rows) // size)))

    def holds(self, indices: Tensor) -> bool:
        """Return whether it is about the images at these rows."""
        return bool((self.place[indices] >= 0).all())

    def look_up(self, indices: Tensor, viewer: Viewer) -> Tensor:
        """Return the features of the images at these rows, (indices, dim); what is nowhere the viewer computes."""
        if self.threads != torch.get_num_threads():  # how sums are cut decides their last bits
            self.threads, self.values = torch.get_num_threads(), None
        if self.values is None:
            shape = len(self.rows), viewer.backbone.dim
            self.values = torch.empty(shape, dtype=viewer.dtype, device=viewer.fabric.device)
            self.missing = set(range(-(-len(self.rows) // self.size)))
        needed = sorted(self.missing & set((self.place[indices] // self.size).unique().tolist()))
        if needed:
            self._fill(needed, self.values, viewer)
        return self.values[self.place[indices].to(self.values.device)]

    def _fill(self, parts: list[int], values: Tensor, viewer: Viewer) -> None:
        """Compute or find parts of the table; those that another process computes are left for later."""
        shelf = self._shelf(viewer)
        slices = {part: slice(part * self.size, min((part + 1) * self.size, len(self.rows))) for part in parts}
        images = sum(each.stop - each.start for each in slices.values())
        since = time.monotonic()
        with viewer.progress.bar(Work("features", images, "img")) as bar:
            computing = functools.cache(lambda: viewer.computing(self.images, self.size, bar))  # takes memory
            while slices:
                for part, each in list(slices.items()):
                    alone = time.monotonic() - since > PATIENCE
                    where = None if alone else shelf
                    if _obtained(part, self.rows[each], values[each], computing, bar, where):
                        self.missing.discard(part)
                        del slices[part]
                        since = time.monotonic()
                if slices:
                    viewer.pause()
                    time.sleep(0.05)
        if shelf is not None and shelf.complaint and not self.told:
            viewer.progress.note(f"frozen features are not kept for other runs: {shelf.complaint}")
            self.told = True

    def _shelf(self, viewer: Viewer) -> Shelf | None:
        if self.name is None or viewer.fabric.world_size > 1 or not _most_bytes():
            return None
        device = viewer.fabric.device
        where = [device.type, self.threads, torch.backends.cpu.get_cpu_capability()]
        if device.type == "cuda":
            where = [device.type, torch.cuda.get_device_name(device), viewer.backbone.compiled]
        return Shelf(digest([self.name, str(viewer.dtype), torch.__version__, where]))


def _obtained(
    part: int, rows: Tensor, values: Tensor, computing: Callable[[], Compute], bar: Bar, shelf: Shelf | None
) -> bool:
    """Find or compute a part; return False if another process computes it at this moment.

    Args:
        part: its number.
        rows: its images.
        values: where its features go.
        computing: returns what computes them.
        bar: who is told of those that were found.
        shelf: where they may lie; None: nowhere.
    """
    if shelf is None:
        values.copy_(computing()(rows))
        return True
    found = shelf.take(part, values)
    if found is None:
        with shelf.claimed(part) as mine:
            if not mine:
                return False
            found = shelf.take(part, values)  # somebody may have been quicker
            if found is None:
                values.copy_(computing()(rows))
                shelf.put(part, values)
                return True
    values.copy_(found)
    bar.advance(len(rows))
    return True


def tables_of(
    config: RunConfig, view: View, stream: Stream, info: CheckpointInfo, known: Iterable[Table] = ()
) -> dict[Images, Table]:
    """Return where the frozen features of a run's images are kept; those that are known are taken over."""
    seen = [view.side, view.mean, view.std, view.interpolation, view.test]
    # The code of a backbone that is drawn may be anybody's.
    code = None if drawn(config.backbone.name) else of_module(COMPUTED_BY)
    name = [info.sha256, config.backbone.input_size, config.backbone.gelu, seen, code]
    subsets = [subset for task in stream.experiences for subset in (task.train, task.validation, task.test)]
    return tables(subsets, config.evaluate.batch_size, None if code is None else name, known)


def tables(
    subsets: Iterable[Subset], batch_size: int, name: Sequence[Any] | None, known: Iterable[Table] = ()
) -> dict[Images, Table]:
    """Return a table for each kind of pixels that the subsets of a benchmark are of; one that is known is taken over.

    `name` is all that decides features but for the images; None: nobody knows.
    """
    of_images: dict[Images, list[Subset]] = {}
    for subset in subsets:
        of_images.setdefault(subset.images, []).append(subset)
    size = batch_size * max(1, PART // batch_size)
    old = {digest(table.name): table for table in known if table.name is not None}
    found = {}
    for images, mine in of_images.items():
        content = None if images.origin is None else images.origin.content
        own = None if name is None or content is None else [content, batch_size, *name]
        table = Table(images, in_order(mine), size, own)
        if table.name is not None:
            table = old.get(digest(table.name), table)
            table.images = images  # the same, but nobody else may need the others any more
        found[images] = table
    return found


def in_order(subsets: Sequence[Subset]) -> Tensor:
    """Return the rows of all images of subsets, class by class, as classes first come in the source.

    So what a task needs lies together, and the order of tasks does not matter.
    """
    rows, first = np.unique(torch.cat([subset.indices for subset in subsets]).numpy(), return_index=True)
    labels = torch.cat([subset.labels for subset in subsets]).numpy()[first]
    beginning = np.full(labels.max(initial=0) + 1, np.iinfo(np.int64).max)
    np.minimum.at(beginning, labels, rows)
    return torch.from_numpy(rows[np.lexsort((rows, beginning[labels]))])
