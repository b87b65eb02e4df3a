"""A head that grows by label: which rows a task trains, and what its masked logits are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualprompt.methods.heads import GrowingHead
from helpers import seeded

DIM = 4


def grown(tasks: list[tuple[int, ...]], train_old: bool = False) -> GrowingHead:
    """A head after tasks of these labels, with random rows."""
    head = GrowingHead(DIM)
    for labels in tasks:
        new = tuple(label for label in labels if label >= head.classes)
        head.begin(labels, new, train_old)
        with torch.no_grad():
            for rows in head.parameters():
                rows.copy_(torch.randn(rows.shape, generator=seeded(len(rows) + len(new))))
    return head


@st.composite
def streams(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Tasks whose labels are new, returning or both; new ones are numbered as they come."""
    tasks, seen = [], 0
    for _ in range(draw(st.integers(1, 5))):
        new = draw(st.integers(0 if seen else 1, 3))
        old = draw(st.sets(st.integers(0, seen - 1))) if seen else set()
        if new or old:
            tasks.append((*sorted(old), *range(seen, seen + new)))
        seen += new
    return tasks


def losses(head: GrowingHead, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The masked loss as the head gives it, and as the paper writes it: −∞ outside the task."""
    own = F.cross_entropy(head.current(features), head.current_places(labels))
    everything = head.all(features)
    outside = torch.ones(head.classes, dtype=torch.bool)
    outside[list(head.labels)] = False
    return own, F.cross_entropy(everything.masked_fill(outside, float("-inf")), labels)


@settings(deadline=None)
@given(streams(), st.integers(0, 99))
def test_masked_logits_are_those_of_the_task_s_labels(tasks: list[tuple[int, ...]], seed: int) -> None:
    head = grown(tasks)
    assert head.classes == len({label for labels in tasks for label in labels})
    features = torch.randn(6, DIM, generator=seeded(seed))
    labels = torch.tensor(tasks[-1])[torch.randint(len(tasks[-1]), (6,), generator=seeded(seed))]
    assert torch.equal(head.current_places(labels), torch.tensor([tasks[-1].index(int(label)) for label in labels]))
    torch.testing.assert_close(head.current(features), head.all(features)[:, list(tasks[-1])])
    own, plain = losses(head, features, labels)
    torch.testing.assert_close(own, plain)
    own.backward()
    moved = {label for label, row in enumerate(gradients(head)) if bool(row.any())}
    assert moved <= set(tasks[-1])
    for block, rows in zip(blocks(head), head.bias, strict=True):
        assert rows.requires_grad == bool(set(block) & set(tasks[-1]))


def blocks(head: GrowingHead) -> list[range]:
    ends = torch.tensor([len(rows) for rows in head.bias]).cumsum(0).tolist()
    return [range(end - len(rows), end) for end, rows in zip(ends, head.bias, strict=True)]


def gradients(head: GrowingHead) -> Tensor:
    found = [torch.zeros_like(rows) if rows.grad is None else rows.grad for rows in head.weight]
    return torch.cat(found)


def test_a_label_that_comes_back_keeps_its_row() -> None:
    head = grown([(0, 1), (2,)])
    before = [rows.detach().clone() for rows in head.weight]
    head.begin((0, 2), (), train_old=False)
    assert head.classes == 3
    assert len(head.weight) == 2
    assert all(torch.equal(old, rows) for old, rows in zip(before, head.weight, strict=True))
    assert head.current_places(torch.tensor([2, 0, 1])).tolist() == [1, 0, -1]


def test_the_task_in_hand_survives_a_restored_head() -> None:
    head = grown([(0, 1), (2, 3), (0, 3)])
    weights, biases = ([rows.detach().clone() for rows in part] for part in (head.weight, head.bias))
    head.restore(weights, biases, train_old=False)  # as a run does that goes on in the middle of a task
    assert head.labels == (0, 3)
    fresh = GrowingHead(DIM)
    fresh.restore(weights, biases, train_old=False)
    assert fresh.labels == (2, 3)  # nothing was begun: the newest


def test_labels_are_numbered_as_they_come() -> None:
    with pytest.raises(ValueError, match=r"new labels go on from 2, but they are \[3\]"):
        grown([(0, 1)]).begin((1, 3), (3,), train_old=False)
