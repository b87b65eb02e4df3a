"""What can be kept of a task's features instead of its images: class means, covariances, cluster centres."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualprompt.methods.base import TaskView, numbered
from dualprompt.prompts.bank import cosine
from dualprompt.seeds import derive


def generator_for(task: TaskView, purpose: str) -> torch.Generator:
    """Return a generator for what is random at a task's end, whatever was drawn at its beginning."""
    return torch.Generator().manual_seed(derive(task.generator.initial_seed(), purpose))


def precise(values: Tensor) -> Tensor:
    """Return the values in float64, which Apple's GPUs lack: theirs come to the CPU."""
    return (values.cpu() if values.device.type == "mps" else values).double()


class TensorList(nn.Module):
    """Buffers that grow by one a task; they are named by number and keep to the module's device."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("_device", torch.empty(0), persistent=False)

    def append(self, values: Tensor) -> None:
        """Add a tensor, in the list's precision."""
        mine = values.detach().to(self.get_buffer("_device").device, self.dtype)
        self.register_buffer(str(len(self)), mine.contiguous())  # laid out as if read from a checkpoint

    def restore(self, values: Sequence[Tensor]) -> None:
        """Replace all tensors, for instance by those of a checkpoint."""
        for index in range(len(self)):
            delattr(self, str(index))
        for value in values:
            self.append(value.clone())

    def __len__(self) -> int:
        return len(self._buffers) - 1

    def __iter__(self) -> Iterator[Tensor]:
        return (self.get_buffer(str(index)) for index in range(len(self)))

    def __getitem__(self, index: int) -> Tensor:
        return self.get_buffer(str(range(len(self))[index]))


def class_means(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the mean of each class's features, (classes, dim); labels count from 0."""
    members = F.one_hot(labels, classes).to(features)  # a matrix product, unlike a scatter, repeats itself on a GPU
    return members.T @ features / members.sum(dim=0).clamp_min(1)[:, None]


def _as_they_are(features: Tensor) -> Tensor:
    return features


def within_class(
    features: Tensor, labels: Tensor, classes: int, expand: Callable[[Tensor], Tensor] = _as_they_are
) -> tuple[Tensor, Tensor]:
    """Return the class means and the scatter matrix Σ (f − μ_y)(f − μ_y)ᵀ, both in float64.

    Features are first passed through `expand`, some at a time: expanded they never exist all at once.
    """
    parts = list(zip(features.split(4096), labels.to(features.device).split(4096), strict=True))
    sums, counts = torch.zeros(()), torch.zeros(())
    for rows, own in parts:
        expanded = precise(expand(rows))
        members = F.one_hot(own, classes).to(expanded)
        sums = sums.to(expanded) + members.T @ expanded
        counts = counts.to(expanded) + members.sum(dim=0)
    means = sums / counts.clamp_min(1)[:, None]
    scatter = torch.zeros(())
    for rows, own in parts:  # about the means, in a second pass: a difference of sums would lose digits
        centred = precise(expand(rows)) - means[own.to(means.device)]
        scatter = scatter.to(centred) + centred.T @ centred
    return means, scatter


def shrunk(scatter: Tensor, count: int, share: float | None = None) -> Tensor:
    """Return the covariance, shrunk by `share` towards a multiple of the identity of the same trace.

    By default as far as `count` samples call for: the oracle approximating shrinkage of Chen et al. (2010), without its
    terms in 2/dim, as in scikit-learn. It has full rank however few the samples are.
    """
    dim = len(scatter)
    covariance = scatter / max(count, 1)
    trace = covariance.trace()
    if share is None:
        square = covariance.square().sum()
        spread = (count + 1) * (square - trace**2 / dim)
        part = ((square + trace**2) / spread.clamp_min(1e-30)).clamp(max=1)
    else:
        part = torch.full_like(trace, share)
    eye = torch.eye(dim, dtype=covariance.dtype, device=covariance.device)
    return (1 - part) * covariance + (part * trace / dim + 1e-8) * eye


def packed(symmetric: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric matrix, row after row: (dim (dim + 1) / 2,)."""
    return symmetric[torch.ones_like(symmetric, dtype=torch.bool).triu()]


def unpacked(triangle: Tensor, dim: int) -> Tensor:
    """Return the symmetric matrix of a `packed` triangle."""
    square = triangle.new_zeros(dim, dim)
    square[torch.ones_like(square, dtype=torch.bool).triu()] = triangle
    return square + square.triu(1).T


class RunningMeans(nn.Module):
    """The mean of all features of each label so far, for labels that come back: dim + 1 numbers each."""

    means: Tensor
    counts: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(0, dim))
        self.register_buffer("counts", torch.zeros(0))

    def include(self, means: Tensor, task: TaskView) -> Tensor:
        """Take in the means of a task's labels, (labels, dim); return those of all labels so far, in float64."""
        count = precise(task.places.bincount(minlength=len(task.labels)))
        labels, grown = list(task.labels), len(task.seen) - len(self.counts)
        found, counts = precise(F.pad(self.means, (0, 0, 0, grown))), precise(F.pad(self.counts, (0, grown)))
        counts[labels] += count
        share = (count / counts[labels].clamp_min(1)).to(found)[:, None]
        found[labels] += share * (means.to(found) - found[labels])
        self.means, self.counts = found.to(self.means), counts.to(self.counts)
        return found

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over the means of a checkpoint."""
        self.means, self.counts = (
            state[name].to(self.means.device, copy=True).contiguous() for name in ("means", "counts")
        )


class Discriminant(nn.Module):
    """Linear discriminant analysis: a mean for each class and one covariance for all, whatever the order of tasks.

    That is dim numbers a class, dim (dim + 1) / 2 in all, and how many samples there were.
    """

    scatter: Tensor
    count: Tensor

    def __init__(self, dim: int, shrinkage: float | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.shrinkage = shrinkage
        self.means = TensorList()  # each (labels that came together, dim)
        self.counts: TensorList | None = None  # samples of each label, where labels come back
        self.register_buffer("scatter", torch.zeros(dim * (dim + 1) // 2))  # within classes, summed over tasks, packed
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def _add(self, means: Tensor, scatter: Tensor, count: int) -> None:
        if len(means):
            self.means.append(means)
        self.scatter += packed(scatter).to(self.scatter)
        self.count += count

    def expect_returning(self) -> None:
        """Count the samples of each label from now on, so that one may come back."""
        self.counts = TensorList()

    def include_features(
        self, features: Tensor, task: TaskView, expand: Callable[[Tensor], Tensor] = _as_they_are
    ) -> None:
        """Take in a task's features, each passed through `expand`; a label that comes back moves its mean."""
        places = task.places
        means, scatter = within_class(features, places, len(task.labels), expand)
        new = [place for place, label in enumerate(task.labels) if label in task.new_labels]
        if self.counts is not None:
            counts = places.bincount(minlength=len(task.labels)).to(means)
            scatter = scatter + self._returned(means, counts, task)
            if new:
                self.counts.append(counts[new])
        self._add(means if len(new) == len(means) else means[new], scatter, len(features))

    def _returned(self, means: Tensor, counts: Tensor, task: TaskView) -> Tensor | float:
        """Move the means of labels that come back; return the scatter between what each was and what came."""
        assert self.counts is not None
        total, first = 0.0, 0
        for old, had in zip(self.means, self.counts, strict=True):
            pairs = [(place, label - first) for place, label in enumerate(task.labels) if 0 <= label - first < len(old)]
            first += len(old)
            if not pairs:
                continue
            here, there = (list(part) for part in zip(*pairs, strict=True))
            came, were = counts[here], had[there].to(means)
            shift = means[here] - old[there].to(means)
            total = total + (shift * (came * were / (came + were))[:, None]).T @ shift
            old[there] += (shift * (came / (came + were))[:, None]).to(old)
            had[there] += came.to(had)
        return total

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return weights (classes, dim) and biases (classes,) of the log-likelihoods of all classes, in float64.

        What all classes have in common is left out of −½ (f − μ)ᵀ Σ⁻¹ (f − μ): that changes no posterior, and leaves
        scores that suit float32.
        """
        means = precise(torch.cat(list(self.means)))
        covariance = shrunk(unpacked(precise(self.scatter), self.dim), int(self.count), self.shrinkage)
        weight = torch.linalg.solve(covariance, means.T).T
        bias = -(weight * means).sum(dim=1) / 2
        return weight - weight.mean(dim=0), bias - bias.mean()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over the statistics of a checkpoint, whose scatter may be a whole square."""
        scatter = state["scatter"]
        self.means.restore(numbered(state, "means"))
        if self.counts is not None:
            self.counts.restore(numbered(state, "counts"))
            if len(self.counts) < len(self.means):  # of a release that did not count them
                self.counts = None
        self.scatter.copy_(scatter if scatter.dim() == 1 else packed(scatter))
        self.count.copy_(state["count"])


class ClassGaussians(nn.Module):
    """A Gaussian for each class of a task: a mean of its own, and a covariance that it shares with the others.

    That is dim numbers a class and dim² a task. A label that comes back has a Gaussian of each task that it was in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.means = TensorList()  # each (classes of the task, dim)
        self.roots = TensorList()  # each (dim, dim): R with R Rᵀ the covariance
        self.labels: TensorList | None = None  # of the means, where labels come back; else each has one, in order

    def expect_returning(self) -> None:
        """Note the label of each mean from now on, so that one may come back."""
        self.labels = TensorList()

    def add(self, features: Tensor, task: TaskView) -> None:
        """Take in a task's features."""
        means, scatter = within_class(features, task.places, len(task.labels))
        self.means.append(means)
        if self.labels is not None:
            self.labels.append(torch.tensor(task.labels))
        self.roots.append(torch.linalg.cholesky(shrunk(scatter, len(features))))

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over the tensors of a checkpoint."""
        self.means.restore(numbered(state, "means"))
        self.roots.restore(numbered(state, "roots"))
        if self.labels is not None:
            self.labels.restore(numbered(state, "labels"))

    def sample(self, a_class: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw `a_class` features of every mean; return them with their labels, mean after mean."""
        drawn = []
        for means, root in zip(self.means, self.roots, strict=True):
            noise = torch.randn(len(means), a_class, means.shape[1], generator=generator).to(means.device)
            drawn.append((means[:, None] + noise @ root.T).flatten(0, 1))
        features = torch.cat(drawn)
        if self.labels is None:
            labels = torch.arange(len(features) // a_class, device=features.device)
        else:
            labels = torch.cat(list(self.labels)).long()
        return features, labels.repeat_interleave(a_class)


def realign(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    gaussians: ClassGaussians,
    generator: torch.Generator,
    steps: int,
    lr: float,
    a_class: int = 128,
    batch: int = 256,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return a linear classifier's rows, trained on by Adam with samples of all classes' Gaussians."""
    features, labels = gaussians.sample(a_class, generator)
    sizes = [len(bias) for bias in biases]
    weight, bias = (torch.cat(list(rows)).detach().requires_grad_() for rows in (weights, biases))
    optimiser = torch.optim.Adam([weight, bias], lr=lr)
    with torch.enable_grad():
        for _ in range(steps):
            rows = torch.randint(len(features), (batch,), generator=generator).to(features.device)
            loss = F.cross_entropy(F.linear(features[rows], weight, bias), labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return list(weight.detach().split(sizes)), list(bias.detach().split(sizes))


def spherical_means(points: Tensor, count: int, generator: torch.Generator, rounds: int = 50) -> Tensor:
    """Return `count` directions that stand for the points, (count, dim): k-means by cosine, from k-means++ seeds."""
    points = F.normalize(points, dim=1)
    centres = points[torch.randint(len(points), (1,), generator=generator)]
    for _ in range(count - 1):
        far = (1 - cosine(points, centres).amax(dim=1)).clamp_min(1e-9).cpu()  # never all zero, as equal points are
        centres = torch.cat([centres, points[torch.multinomial(far, 1, generator=generator)]])
    assigned = torch.full((len(points),), -1, device=points.device)
    for _ in range(rounds):
        before, assigned = assigned, cosine(points, centres).argmax(dim=1)
        if torch.equal(before, assigned):
            break
        members = F.one_hot(assigned, count).to(points)
        alone = members.sum(dim=0) == 0  # nobody's nearest: it stays where it is
        centres = torch.where(alone[:, None], centres, F.normalize(members.T @ points, dim=1))
    return centres


class KeyMatching(nn.Module):
    """Several keys a task, the centres of its queries; an image belongs to the task of the nearest one."""

    joined: Tensor

    def __init__(self, dim: int, keys_per_task: int) -> None:
        super().__init__()
        self.keys_per_task = keys_per_task
        self.keys = TensorList()  # each (keys per task, dim)
        self.register_buffer("joined", torch.empty(0, dim), persistent=False)  # once a task, so that matching is cheap

    def add(self, queries: Tensor, labels: Tensor, classes: int, generator: torch.Generator) -> None:
        """Take in a task's queries."""
        self.keys.append(spherical_means(queries, self.keys_per_task, generator))
        self.joined = torch.cat(list(self.keys))

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over the keys of a checkpoint."""
        self.keys.restore(numbered(state, "keys"))
        if len(self.keys):
            self.joined = torch.cat(list(self.keys))

    def match(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the task of each query, and the query's cosine with the nearest key, both (batch,)."""
        similarity, nearest = cosine(query, self.joined).max(dim=1)
        return nearest // self.keys_per_task, similarity


class GaussianMatching(Discriminant):
    """An image belongs to the task of its likeliest class."""

    weight: Tensor
    bias: Tensor
    task_of: Tensor
    directions: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        # Which class is likeliest is a linear question, made once a task.
        self.register_buffer("weight", torch.empty(0, dim), persistent=False)
        self.register_buffer("bias", torch.empty(0), persistent=False)
        self.register_buffer("task_of", torch.empty(0, dtype=torch.int64), persistent=False)
        self.register_buffer("directions", torch.empty(0, dim), persistent=False)  # of all means

    def add(self, queries: Tensor, labels: Tensor, classes: int, generator: torch.Generator) -> None:
        """Take in a task's queries; its labels count from 0."""
        self._add(*within_class(queries, labels, classes), len(queries))
        self._prepare()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over the statistics of a checkpoint."""
        super().restore(state)
        if len(self.means):
            self._prepare()

    def _prepare(self) -> None:
        weight, bias = self.solve()
        self.weight, self.bias = weight.to(self.scatter), bias.to(self.scatter)
        self.directions = F.normalize(precise(torch.cat(list(self.means))), dim=1).to(self.scatter)
        sizes = torch.tensor([len(means) for means in self.means])
        self.task_of = torch.arange(len(sizes)).repeat_interleave(sizes).to(self.scatter.device)

    def match(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the task of each query, and the query's cosine with the nearest mean of that task, both (batch,)."""
        task = self.task_of[F.linear(query, self.weight, self.bias).argmax(dim=1)]
        others = self.task_of != task[:, None]
        return task, cosine(query, self.directions).masked_fill(others, -1.0).amax(dim=1)
