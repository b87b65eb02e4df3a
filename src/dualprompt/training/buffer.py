"""The rehearsal buffer: the images of old tasks that a method may see again."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dualprompt.data.images import Images
from dualprompt.data.stream import Subset
from dualprompt.methods.base import BufferPlan
from dualprompt.seeds import derive


class Buffer:
    """At most `plan.size` images of the tasks so far: its own copies, as the dataset has them, never augmented.

    "reservoir" keeps every image of the stream so far with equal probability (Algorithm R). "balanced" is GDumb's
    greedy sampler: once the buffer is full, a class with fewer images takes a slot from the largest class. With
    notes, what the method said of an image when its task ended stays with the image for as long as it is kept.
    """

    def __init__(self, plan: BufferPlan, seed: int) -> None:
        self.plan, self.seed = plan, seed
        self.seen = 0  # images offered so far
        self._hold(Images.concat([]), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0) if plan.notes else None)

    def _hold(self, images: Images, labels: Tensor, notes: Tensor | None) -> None:
        self._subset = Subset(images, torch.arange(len(images)), labels, notes)

    def __len__(self) -> int:
        return len(self._subset)

    @property
    def bytes(self) -> int:
        """The size of what is held: pixels, labels and notes."""
        held = self._subset
        return held.images.flat.nbytes + held.labels.nbytes + (0 if held.notes is None else held.notes.nbytes)

    def as_subset(self) -> Subset:
        """Return all that is held; the same object until the next offer."""
        return self._subset

    def offer(self, subset: Subset, task: int, note: Callable[[Subset], Tensor] | None = None) -> None:
        """Offer each image of a task once, in an order that the seed and the task decide.

        `note` is asked once, about the images that are kept, if the plan wants notes.
        """
        generator = torch.Generator().manual_seed(derive(self.seed, "buffer", task))
        order = torch.randperm(len(subset), generator=generator)
        before, held = self._subset, len(self)
        if self.plan.policy == "reservoir":
            kept = _reservoir(self.seen, len(subset), self.plan.size, generator)
        else:
            kept = _balanced(torch.cat([before.labels, subset.labels[order]]), self.plan.size, generator)
        self.seen += len(subset)
        old, new = kept[kept < held], order[kept[kept >= held] - held]
        fresh = Subset(subset.images, subset.indices[new], subset.labels[new])
        notes = None
        if before.notes is not None:
            if note is None:
                raise ValueError("the plan of this buffer asks for notes, but none are offered")
            notes = _stack(before.notes[old], note(fresh)) if len(fresh) else before.notes[old]
        images = Images.concat([before.images.select(old), fresh.images.select(fresh.indices)])
        self._hold(images, torch.cat([before.labels[old], fresh.labels]), notes)

    def state(self) -> dict[str, Tensor]:
        """Return all that the next offer and the next draw depend on, by name."""
        held = self._subset
        state = {"pixels": held.images.flat, "shapes": held.images.shapes, "labels": held.labels}
        return {**state, "seen": torch.tensor(self.seen)} | ({} if held.notes is None else {"notes": held.notes})

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the result of `state()`."""
        state = {name: value.cpu() for name, value in state.items()}
        self.seen = int(state["seen"])
        self._hold(Images(state["pixels"], state["shapes"]), state["labels"], state.get("notes"))


def _reservoir(seen: int, offered: int, size: int, generator: torch.Generator) -> Tensor:
    """Return what fills the slots after an offer, as rows of (held, offered).

    The i-th image of the stream, counted from 1, goes to one of i slots at random, if the buffer has that slot; the
    first ones fill it. Which slot an image of an earlier offer has does not matter, as all are replaced alike.
    """
    held = min(seen, size)
    before = seen + torch.arange(offered)
    drawn = (torch.rand(offered, generator=generator, dtype=torch.float64) * (before + 1)).long()
    slot = torch.where(before < size, before, drawn)
    into = slot < size
    holder = torch.arange(min(seen + offered, size))
    return holder.scatter_reduce_(0, slot[into], held + torch.arange(offered)[into], "amax")  # the last one stays


def _balanced(labels: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return the rows of (held, offered) that stay, given the labels of both.

    An image comes in as long as there is room; then, if its class has none yet or at least two fewer than the
    largest class, it takes the place of a random image of that class. So no class is ever more than one short of
    the largest, unless everything it was offered is kept.
    """
    rows: dict[int, list[int]] = {}
    chances = torch.rand(len(labels), generator=generator, dtype=torch.float64).tolist()
    room, largest = size, 0
    for row, (label, chance) in enumerate(zip(labels.tolist(), chances, strict=True)):
        mine = rows.setdefault(label, [])
        if room:
            room -= 1
        elif not mine or len(mine) + 1 < largest:
            richest = max(rows.values(), key=len)
            richest.pop(int(chance * len(richest)))
        else:
            continue
        mine.append(row)
        largest = max(map(len, rows.values()))
    return torch.tensor(sorted(row for members in rows.values() for row in members), dtype=torch.int64)


def _stack(old: Tensor, new: Tensor) -> Tensor:
    """Return both below each other, with NaN in the columns that one of them lacks."""
    new = new.detach().to("cpu", torch.float32)
    columns = max(old.shape[1], new.shape[1])
    return torch.cat([F.pad(notes, (0, columns - notes.shape[1]), value=torch.nan) for notes in (old, new)])
