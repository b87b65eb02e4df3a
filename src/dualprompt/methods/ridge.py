"""Classifiers in closed form: ridge regression of one-hot labels, from sums over everything seen so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualprompt.errors import DualPromptError
from dualprompt.methods.base import TaskView, numbered
from dualprompt.methods.statistics import TensorList, packed, precise, unpacked

STRENGTHS = tuple(10.0**power for power in range(-8, 9))
"""The values of λ that RanPAC tries."""
HALF_POWERS = range(-8, 5)
"""Half powers of ten: the shares of the mean of HᵀH's diagonal among which λ is found from the sums."""
ALONE_SHARE = 0.003
"""That share where most samples are the only one of their label: left out, it takes the label with it, and sums say
nothing of it but that answers had best be 0."""


@dataclass(frozen=True)
class Moments:
    """All that ridge regression needs to know of features H and one-hot labels Y, in float64."""

    gram: Tensor  # HᵀH, (dim, dim)
    sums: Tensor  # HᵀY, (dim, classes)
    count: int

    @staticmethod
    def of(features: Tensor, labels: Tensor, classes: int, expand: Callable[[Tensor], Tensor]) -> Moments:
        """Sum over the features, each first passed through `expand`; they never exist all at once when expanded."""
        gram, sums = torch.zeros(()), torch.zeros(())
        for rows, own in zip(features.split(4096), labels.split(4096), strict=True):
            expanded = precise(expand(rows))
            gram = gram.to(expanded) + expanded.T @ expanded
            sums = sums.to(expanded) + expanded.T @ F.one_hot(own, classes).to(expanded)
        return Moments(gram, sums, len(features))

    def error(self, weight: Tensor) -> float:
        """Return the mean squared error ‖HW − Y‖² / n of (dim, classes) weights."""
        residual = (weight * (self.gram @ weight - 2 * self.sums)).sum() + self.count
        return float(residual) / max(self.count, 1)


def choose_strength(fit: Moments, held_out: Moments) -> float:
    """Return the λ of `STRENGTHS` whose solution on `fit` errs least on `held_out`."""
    return _best(lambda strength: _weights(fit.gram, fit.sums, strength), held_out.error)


def choose_strength_by_samples(features: Tensor, labels: Tensor, held: Tensor, held_labels: Tensor) -> float:
    """Return the same λ from float64 features and one-hot labels, where there are fewer samples than features.

    The solution is Hᵀ(HHᵀ + λI)⁻¹Y, so that nothing larger than samples × samples is solved.
    """
    gram, across = features @ features.T, held @ features.T

    def error(weights: Tensor) -> float:
        return float((across @ weights - held_labels).square().sum())

    return _best(lambda strength: _weights(gram, labels, strength), error)


@dataclass(frozen=True)
class SumsFit:
    """What sums tell of ridge regression on n samples: how it would answer a sample that was left out."""

    strength: float  # λ
    error: float  # generalised cross-validation: mean squared error of a sample's outputs
    true: float  # mean output of a sample's own label
    other: float  # mean output of each other label
    outputs: int

    def sharpness(self, most: float) -> float:
        """Return what outputs are multiplied by as logits: `most` where a sample's own label comes out as 1.

        The stronger λ, the closer outputs are to 0, so the factor rises with 1 / `true`. But it is not above that of
        Gaussian noise about the two means, where it would make guesses look sure.
        """
        spread = (1 - self.true) ** 2 + (self.outputs - 1) * self.other**2
        variance = max((self.error - spread) / self.outputs, 1e-9)
        factor = min(most / max(self.true, 1e-3), (self.true - self.other) / variance)
        return factor if factor > 0 else most  # nothing was learned that would tell


def fit_by_sums(gram: Tensor, sums: Tensor, samples: int, count: int, rounding: float = 0.0) -> SumsFit:
    """Choose the λ of least generalised cross-validation error (Golub et al., 1979), which sums alone can tell.

    The error is n ‖HW − Y‖² / (n − tr H(G + λI)⁻¹Hᵀ)², about what is lost when each sample is left out in turn. No
    sample is held out for it, and all tasks have their say. It is walked downhill from a tenth of the diagonal's mean.

    Args:
        gram: G = HᵀH in float64, of all samples.
        sums: HᵀY, (dim, outputs), of one-hot labels.
        samples: those that have a label, ‖Y‖²; the others were forgotten.
        count: n, of all samples.
        rounding: of the sums as they are kept; squared residuals below this share of ‖Y‖² are nothing but that.
    """
    mean = float(gram.diagonal().mean())
    found: dict[int, SumsFit] = {}

    def error(step: int) -> float:
        if step not in found:
            found[step] = _fit(gram, sums, samples, count, mean * 10 ** (step / 2), rounding)
        return found[step].error

    best = -2
    for direction in (1, -1):
        while best + direction in HALF_POWERS and error(best + direction) < error(best):
            best += direction
    error(best)
    return found[best]


def _fit(gram: Tensor, sums: Tensor, samples: int, count: int, strength: float, rounding: float) -> SumsFit:
    outputs, impossible = sums.shape[1], SumsFit(strength, float("inf"), 0.0, 0.0, sums.shape[1])
    root = _root(gram, strength)
    if root is None:
        return impossible
    free = count - len(gram) + strength * float(torch.cholesky_inverse(root).trace())
    if free <= 0:
        return impossible
    weight = torch.cholesky_solve(sums, root)
    residual = samples - float((weight * sums).sum()) - strength * float(weight.square().sum())
    residual = max(residual, samples * rounding)
    true = float((weight * sums).sum()) / max(samples, 1)
    others = float((sums.sum(dim=1) @ weight).sum()) - true * samples
    kept = free / max(count, 1)  # of a sample's residual is left of what it would be without the sample
    return SumsFit(
        strength,
        residual / max(count, 1) / kept**2,
        1 - (1 - true) / kept,
        others / max(samples * (outputs - 1), 1) / kept,
        outputs,
    )


def _best(solve: Callable[[float], Tensor | None], error: Callable[[Tensor], float]) -> float:
    best, chosen = float("inf"), STRENGTHS[-1]
    for strength in STRENGTHS:
        weights = solve(strength)
        if weights is not None and (found := error(weights)) < best:
            best, chosen = found, strength
    return chosen


def _root(gram: Tensor, strength: float) -> Tensor | None:
    """Return the Cholesky factor of G + λI, or None where λ is too little for what float64 can tell apart."""
    shifted = gram.clone()
    shifted.diagonal().add_(strength)
    root, failed = torch.linalg.cholesky_ex(shifted)
    return None if int(failed) else root


def _weights(gram: Tensor, sums: Tensor, strength: float) -> Tensor | None:
    """Return (G + λI)⁻¹ C, or None where there is no Cholesky factor."""
    root = _root(gram, strength)
    return None if root is None else torch.cholesky_solve(sums, root)


def weights_of(gram: Tensor, sums: Tensor, strength: float) -> Tensor:
    """Return (G + λI)⁻¹ C in float64, (dim, outputs), with a larger λ where rounded sums call for one."""
    while (weights := _weights(gram, sums, strength)) is None:
        strength = max(10 * strength, 1e-12)  # features of a dead network are all zero, and so is a share of them
    return weights


def add_columns(blocks: TensorList, sums: Tensor, task: TaskView) -> None:
    """Append the columns of a task's new labels as a block, and add those of labels that return to what is there.

    `sums` (…, labels) are the task's. Blocks lie one after another, so that a label is the number of its column.
    """
    new = [place for place, label in enumerate(task.labels) if label in task.new_labels]
    first = 0
    for block in blocks:
        for place, label in enumerate(task.labels):
            if first <= label < first + block.shape[-1]:
                block[..., label - first] += sums[..., place].to(block)
        first += block.shape[-1]
    if new:
        blocks.append(sums[..., new])


class Ridge(nn.Module):
    """The sums over all tasks. They grow by a column a new label, and no feature is kept.

    If `counted`, it also knows how many samples there were, and λ is chosen by the sums.
    """

    gram: Tensor

    def __init__(self, dim: int, expand: Callable[[Tensor], Tensor], counted: bool = False) -> None:
        super().__init__()
        self.dim, self.expand = dim, expand  # `expand` makes the (batch, dim) inputs of the regression from features
        self.register_buffer("gram", torch.zeros(dim * (dim + 1) // 2))  # HᵀH is symmetric: its upper triangle
        self.sums = TensorList()  # each (dim, labels that came together)
        self.counted = counted
        self.fit: SumsFit | None = None  # the newest, if `counted` and the sums could tell
        if counted:
            self.counts = TensorList()  # samples of each label, as `sums`
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))  # of all, forgotten ones too

    def add(
        self,
        features: Tensor,
        task: TaskView,
        strength: float | None,
        generator: torch.Generator,
        share: float | None = None,
    ) -> list[Tensor]:
        """Take in a task's features; return the weights of all labels, solved anew, a (labels, dim) tensor a block.

        Args:
            features: of the task's training images, before `expand`.
            task: says their labels. Sums of a label that returns are added to its own.
            strength: λ; None: by `share`, or else chosen by the sums if `counted`, if not on a fifth of these features.
            generator: draws that fifth.
            share: λ as a share of the mean of HᵀH's diagonal.
        """
        labels, classes = task.places.to(features.device), len(task.labels)
        moments = Moments.of(features, labels, classes, self.expand)
        if not bool(torch.isfinite(moments.gram).all()):
            raise DualPromptError("the features of the newest task are not finite; lower train.lr or set train.clip")
        self.gram += packed(moments.gram).to(self.gram)
        add_columns(self.sums, moments.sums, task)
        if self.counted:
            add_columns(self.counts, labels.bincount(minlength=classes), task)
            self.get_buffer("count").add_(len(features))
        if strength is None and share is None:
            if self.counted:
                self.fit = self._by_sums()
                strength, share = (None, ALONE_SHARE) if self.fit is None else (self.fit.strength, None)
            else:
                strength = self._chosen(features, labels, classes, generator)
        return self.solve(strength, share or 0.0)

    def _by_sums(self) -> SumsFit | None:
        counts = torch.cat(list(self.counts))
        samples = int(counts.sum())
        if 2 * int((counts == 1).sum()) > samples:
            return None
        gram = unpacked(precise(self.gram), self.dim)
        sums = torch.cat([precise(part) for part in self.sums], dim=1)
        return fit_by_sums(gram, sums, samples, int(self.get_buffer("count")), torch.finfo(self.gram.dtype).eps)

    def _chosen(self, features: Tensor, labels: Tensor, classes: int, generator: torch.Generator) -> float:
        order = torch.randperm(len(features), generator=generator).to(features.device)
        fifth = max(1, len(order) // 5) if len(order) > 1 else 0
        if not fifth:  # a single image has nothing to be judged on
            return float(precise(self.gram).abs().max())
        held, fitted = order.split([fifth, len(order) - fifth])
        if len(fitted) < self.dim:
            parts = [(precise(self.expand(features[rows])), labels[rows]) for rows in (fitted, held)]
            (mine, own), (theirs, their) = [(rows, F.one_hot(of, classes).to(rows)) for rows, of in parts]
            return choose_strength_by_samples(mine, own, theirs, their)
        return choose_strength(
            *(Moments.of(features[rows], labels[rows], classes, self.expand) for rows in (fitted, held))
        )

    def strength_of(self, weights: Sequence[Tensor]) -> float:
        """Return the λ that these weights of all labels were solved with: C − GW = λW."""
        weight, sums = precise(torch.cat(list(weights))).T, torch.cat([precise(part) for part in self.sums], dim=1)
        rest = sums - unpacked(precise(self.gram), self.dim) @ weight
        return max(float((rest * weight).sum() / weight.square().sum().clamp_min(1e-30)), 0.0)

    def solve(self, strength: float | None, share: float = 0.0) -> list[Tensor]:
        """Return (G + λI)⁻¹ C for each task's classes, transposed: (classes, dim)."""
        gram = unpacked(precise(self.gram), self.dim)
        # The sums are float32: a λ below their rounding would fit the rounding.
        rounding = torch.finfo(torch.float32).eps * self.dim**0.5 * float(gram.diagonal().max())
        wanted = share * float(gram.diagonal().mean()) if strength is None else strength
        sums = [precise(part) for part in self.sums]
        weight = weights_of(gram, torch.cat(sums, dim=1), max(wanted, rounding))
        return list(weight.T.to(self.gram).contiguous().split([part.shape[1] for part in sums]))

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over the sums of a checkpoint; those of an older version hold both triangles."""
        gram = state["gram"]
        self.gram.copy_(packed(gram) if gram.ndim == 2 else gram)
        self.sums.restore(numbered(state, "sums"))
        if self.counted:
            self.counts.restore(numbered(state, "counts"))
            self.get_buffer("count").copy_(state["count"])
