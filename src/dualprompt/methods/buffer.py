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

Asked = Callable[[Subset], Tensor]  # what the method says of images, one row each


class Buffer:
    """At most `plan.size` images of the tasks so far: its own copies, as the dataset has them, never augmented.

    "reservoir" keeps every image of the stream so far with equal probability (Algorithm R). "balanced" is GDumb's
    greedy sampler: once the buffer is full, a class with fewer images takes a slot from the largest class. "herding"
    keeps as many of every class, the first ones of the order in which `herd` ranks them; the order in which they are
    held is that ranking, so a class that must make room loses its last ones. With notes, what the method said of an
    image when its task ended stays with the image for as long as it is kept; before that, its note is all NaN.

    With a reserve, the buffer decides at a task's beginning which of its images are set aside, and keeps these apart:
    what was reserved once is never given out for training, and what was trained on is never reserved.
    """

    def __init__(self, plan: BufferPlan, seed: int) -> None:
        self.plan, self.seed = plan, seed
        self.seen = 0  # images offered so far
        none = torch.zeros(0, dtype=torch.bool)
        self._hold(Images.concat([]), none.long(), torch.zeros(0, 0) if plan.notes else None, none)

    def _hold(self, images: Images, labels: Tensor, notes: Tensor | None, reserved: Tensor) -> None:
        self._subset = Subset(images, torch.arange(len(images)), labels, notes)
        self._is_reserved = reserved
        self._trained = part(self._subset, ~reserved) if self.plan.reserve else self._subset
        self._reserved = part(self._subset, reserved)

    def __len__(self) -> int:
        return len(self._subset)

    @property
    def bytes(self) -> int:
        """The size of what is held: pixels, labels, notes and what tells the reserve apart."""
        return sum(value.nbytes for name, value in self.state().items() if name not in ("shapes", "seen"))

    def as_subset(self) -> Subset:
        """Return all that may be trained on; the same object until the next offer."""
        return self._trained

    def reserved(self) -> Subset:
        """Return what is set aside; the same object until the next offer."""
        return self._reserved

    def to_reserve(self, subset: Subset, task: int) -> Tensor:
        """Mark the images of a new task that are set aside, in an order that the seed and the task decide.

        As many of a class as the old classes have, but at most a tenth of its images, or one if it has two to nineteen.
        """
        marked = torch.zeros(len(subset), dtype=torch.bool)
        if not self.plan.reserve:
            return marked
        classes, counts = subset.labels.unique(return_counts=True)
        old = self._reserved.labels.bincount().tolist()
        each = max(old) if old else max(1, reserve_size(self.plan.size, len(classes)) // max(1, len(classes)))
        generator = torch.Generator().manual_seed(derive(self.seed, "reserve", task))
        for label, count in zip(classes, counts.tolist(), strict=True):
            mine = (subset.labels == label).nonzero()[:, 0]
            wanted = min(each, max(1, count // 10), count - 1)
            marked[mine[torch.randperm(count, generator=generator)[:wanted]]] = True
        return marked

    def offer(
        self,
        subset: Subset,
        task: int,
        note: Asked | None = None,
        features: Asked | None = None,
        step: int | None = None,
    ) -> None:
        """Offer each image of a task once, in an order that the seed and the task decide.

        Args:
            subset: the images that are offered: all of the task's, or those of one step.
            task: its number.
            note: asked once, about the images that are kept, if the plan wants notes.
            features: asked once, about all of them, if the policy is herding.
            step: which step of the task it is, if they come by the step.
        """
        if self.plan.notes and note is None:
            raise ValueError("the plan of this buffer asks for notes, but none are offered")
        place = (task,) if step is None else (task, step)
        generator = torch.Generator().manual_seed(derive(self.seed, "buffer", *place))
        order = torch.randperm(len(subset), generator=generator)
        before, held = self._subset, len(self)
        labels = torch.cat([before.labels, subset.labels[order]])
        reserved = torch.cat([self._is_reserved, self.to_reserve(subset, task)[order]])
        if self.plan.policy == "reservoir":
            kept = _reservoir(self.seen, len(subset), self.plan.size, generator)
        elif self.plan.policy == "herding":
            if features is None:
                raise ValueError("the plan of this buffer is to herd, but no features are offered")
            kept = _herded(labels, held, features(subset).cpu()[order], self.plan.size)
        else:
            apart, others = reserved.nonzero()[:, 0], (~reserved).nonzero()[:, 0]
            room = reserve_size(self.plan.size, len(labels.unique()))
            apart = apart[_balanced(labels[apart], room, generator)]
            others = others[_balanced(labels[others], self.plan.size - len(apart), generator)]
            kept = torch.cat([others, apart]).sort().values
        self.seen += len(subset)
        old, new = kept[kept < held], kept[kept >= held]
        if not len(new):  # as with most steps, once many images were seen
            return
        kept, new = torch.cat([old, new]), order[new - held]
        fresh = Subset(subset.images, subset.indices[new], subset.labels[new])
        notes = None
        if before.notes is not None and note is not None:
            notes = _stack(before.notes[old], note(fresh))
        images = Images.concat([before.images.select(old), fresh.images.select(fresh.indices)])
        self._hold(images, labels[kept], notes, reserved[kept])

    def note_missing(self, note: Asked) -> None:
        """Ask once about all images held of which nothing is noted yet."""
        held = self._subset
        if held.notes is None:
            raise ValueError("the plan of this buffer has no notes")
        missing = held.notes.isnan().all(dim=1)
        if missing.any():
            notes = _stack(held.notes[~missing], note(part(held, missing)))
            self.restore_notes(notes[torch.cat([(~missing).nonzero(), missing.nonzero()])[:, 0].argsort()])

    def restore_notes(self, notes: Tensor) -> None:
        """Replace what was noted of all images held."""
        held = self._subset
        if len(notes) != len(held):
            raise ValueError(f"there are notes of {len(notes)} images, but {len(held)} are held")
        self._hold(held.images, held.labels, notes, self._is_reserved)

    def state(self) -> dict[str, Tensor]:
        """Return all that the next offer and the next draw depend on, by name."""
        held = self._subset
        state = {"pixels": held.images.flat, "shapes": held.images.shapes, "labels": held.labels}
        state |= {} if held.notes is None else {"notes": held.notes}
        state |= {"reserved": self._is_reserved} if self.plan.reserve else {}
        return state | {"seen": torch.tensor(self.seen)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the result of `state()`."""
        state = {name: value.cpu() for name, value in state.items()}
        self.seen = int(state["seen"])
        none = torch.zeros(len(state["labels"]), dtype=torch.bool)
        reserved = state["reserved"] if self.plan.reserve else none
        self._hold(Images(state["pixels"], state["shapes"]), state["labels"], state.get("notes"), reserved)


def part(subset: Subset, chosen: Tensor) -> Subset:
    """Return the images of a subset that are chosen, by a mask or by rows, with what is known of them."""
    notes, alike = (None if each is None else each[chosen] for each in (subset.notes, subset.alike))
    return Subset(subset.images, subset.indices[chosen], subset.labels[chosen], notes, alike)


def reserve_size(size: int, classes: int) -> int:
    """Return how many of a buffer's places are for reserved images: a tenth, or one a class, but at most half."""
    return max(size // 10, min(classes, size // 2))


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


def herd(features: Tensor, count: int) -> Tensor:
    """Return the first `count` rows of features (images, dim) in the order of herding (Welling, 2009; iCaRL, 2017).

    The next one is always that image, of those left, with which the mean of all chosen so far is nearest to the mean
    of all images. As features have length one, that is the one with the largest product with w = k·mean − Σ chosen.
    """
    features = F.normalize(features.double(), dim=1)
    mean = features.mean(dim=0)
    wanted, chosen = mean.clone(), list[int]()
    left = torch.zeros(len(features), dtype=torch.float64)
    for _ in range(min(count, len(features))):
        row = int((features @ wanted + left).argmax())
        left[row] = -torch.inf
        wanted += mean - features[row]
        chosen.append(row)
    return torch.tensor(chosen, dtype=torch.int64)


def _herded(labels: Tensor, held: int, features: Tensor, size: int) -> Tensor:
    """Return the rows of (held, offered) that stay, given the labels of both, in the order of their classes' rankings.

    Every class has size / classes places, rounded down; where there are more classes than places, the oldest have one.
    """
    offered = labels[held:]
    classes = list(dict.fromkeys(labels[:held].tolist())) + sorted(set(offered.tolist()) - set(labels[:held].tolist()))
    places = size // len(classes) if classes else 0
    room = {label: places or int(number < size) for number, label in enumerate(classes)}
    old, new = list[Tensor](), list[Tensor]()
    for label in classes:
        mine = (labels[:held] == label).nonzero()[:, 0][: room[label]]
        rows = (offered == label).nonzero()[:, 0]
        old.append(mine)
        new.append(held + rows[herd(features[rows], room[label] - len(mine))])
    return torch.cat([torch.cat(old).sort().values, *new]) if classes else torch.zeros(0, dtype=torch.int64)


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
        elif not size:
            break
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
