"""Classifiers in closed form: ridge regression of one-hot labels, from sums over everything seen so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualprompt.methods.base import numbered
from dualprompt.methods.statistics import TensorList, precise

STRENGTHS = tuple(10.0**power for power in range(-8, 9))
"""The values of λ that RanPAC tries."""


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

    def within(self, basis: Tensor) -> Moments:
        """Return the moments of the features' coordinates in an orthonormal basis, (dim, smaller dim)."""
        return Moments(basis.T @ self.gram @ basis, basis.T @ self.sums, self.count)

    def error(self, weight: Tensor) -> float:
        """Return the mean squared error ‖HW − Y‖² / n of (dim, classes) weights."""
        residual = (weight * (self.gram @ weight - 2 * self.sums)).sum() + self.count
        return float(residual) / max(self.count, 1)


def choose_strength(fit: Moments, held_out: Moments) -> float:
    """Return the λ of `STRENGTHS` whose solution on `fit` errs least on `held_out`."""
    best, chosen = float("inf"), STRENGTHS[-1]
    diagonal = fit.gram.diagonal().clone()
    for strength in STRENGTHS:
        gram = fit.gram.clone()
        gram.diagonal().copy_(diagonal + strength)
        root, failed = torch.linalg.cholesky_ex(gram)
        if int(failed):  # too little λ for what float64 can tell apart
            continue
        error = held_out.error(torch.cholesky_solve(fit.sums, root))
        if error < best:
            best, chosen = error, strength
    return chosen


class Ridge(nn.Module):
    """The sums over all tasks. They grow by a column a class, and no feature is kept."""

    gram: Tensor

    def __init__(self, dim: int, expand: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.expand = expand  # what makes (batch, dim) inputs of the regression from features
        self.register_buffer("gram", torch.zeros(dim, dim))
        self.sums = TensorList()  # each (dim, classes of the task)

    def add(
        self, features: Tensor, labels: Tensor, classes: int, strength: float | None, generator: torch.Generator
    ) -> list[Tensor]:
        """Take in a task's features and return the weights of all tasks' classes, each (classes, dim), solved anew.

        Labels count from 0 in the task. Without a `strength`, λ is chosen on a fifth of these features.
        """
        order = torch.randperm(len(features), generator=generator).to(features.device)
        held, fitted = order.split([len(order) // 5, len(order) - len(order) // 5])
        labels = labels.to(features.device)
        fit, held_out = (Moments.of(features[rows], labels[rows], classes, self.expand) for rows in (fitted, held))
        self.gram += (fit.gram + held_out.gram).to(self.gram)
        self.sums.append(fit.sums + held_out.sums)
        if strength is None:
            if len(fitted) < len(self.gram):  # solutions lie in the span of the samples, which is the smaller space
                basis = torch.linalg.qr(precise(self.expand(features[fitted])).T).Q
                fit, held_out = fit.within(basis), held_out.within(basis)
            strength = choose_strength(fit, held_out)
        return self.solve(strength)

    def solve(self, strength: float) -> list[Tensor]:
        """Return (G + λI)⁻¹ C for each task's classes, transposed: (classes, dim)."""
        gram = precise(self.gram)
        # The sums are float32: a λ below their rounding would fit the rounding.
        rounding = torch.finfo(torch.float32).eps * len(gram) ** 0.5 * float(gram.diagonal().max())
        gram.diagonal().add_(max(strength, rounding))
        sums = [precise(part) for part in self.sums]
        weight = torch.linalg.solve(gram, torch.cat(sums, dim=1)).T.to(self.gram).contiguous()
        return list(weight.split([part.shape[1] for part in sums]))

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over the sums of a checkpoint."""
        self.gram.copy_(state["gram"])
        self.sums.restore(numbered(state, "sums"))
