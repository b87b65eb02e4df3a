"""Checkpoints by themselves: what is written comes back, and what cannot be one is refused."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from dualprompt.errors import DualPromptError
from dualprompt.methods.frozen_head import FrozenHead, FrozenHeadConfig
from dualprompt.run import checkpoint
from dualprompt.run.checkpoint import Checkpoints, Position
from helpers import tiny_vit


def test_numbers_of_any_stride_come_back(tmp_path: Path) -> None:
    table = torch.arange(12.0).view(3, 4)
    tensors = {
        "one": table[:1, -1],
        "column": table[:, 1],
        "none": table[:0],
        "scalar": table[2, 3],
        "half": table.half().T,
    }
    checkpoint.write(tmp_path / "a.safetensors", tensors, asdict(Position()))
    found, _ = checkpoint.read(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


class Keeps(FrozenHead):
    """It has what a test says, whatever it is given."""

    found: dict[str, Tensor]

    def state(self) -> dict[str, Tensor]:
        return self.found

    def load_state(self, state: dict[str, Tensor]) -> None:
        pass


NAN = torch.tensor([1.0, float("nan")])


@pytest.mark.parametrize(
    ("given", "found", "taken"),
    [
        (NAN, NAN.clone(), True),
        (NAN, torch.tensor([1.0, 2.0]), False),
        (NAN, torch.tensor([float("nan"), 1.0]), False),
        (torch.ones(3, 3), torch.ones(6), True),  # a triangle of it, as versions of before had both
        (torch.ones(3), torch.ones(0), False),
        (torch.ones(0), torch.ones(0), True),
        (torch.tensor([3, 4]), torch.tensor([3, 5]), False),
        (torch.ones(2), None, False),
    ],
)
def test_a_method_has_all_that_it_was_given(given: Tensor, found: Tensor | None, taken: bool, tmp_path: Path) -> None:
    method = Keeps(FrozenHeadConfig(), tiny_vit())
    method.found = {"own": torch.ones(1)} | ({} if found is None else {"x": found})
    with nullcontext() if taken else pytest.raises(DualPromptError, match="does not take over 'x' of its own state"):
        checkpoint.restore(method, {"x": given}, tmp_path)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_who_may_read_other_files_may_read_checkpoints(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        checkpoint.write(tmp_path / "a.safetensors", {"x": torch.zeros(1)}, asdict(Position()))
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("I/O error: No space left on device (os error 28)", errno.ENOSPC),
        ("I/O error: No space left on device", errno.ENOSPC),
        ("I/O error: Auf dem Gerät ist kein Speicherplatz mehr verfügbar (os error 28)", errno.ENOSPC),
        ("I/O error: Input/output error (os error 5)", errno.EIO),
    ],
)
def test_a_full_disk_is_told_from_other_troubles(said: str, number: int) -> None:
    assert checkpoint._disk_error(SafetensorError(said)) == (number, said)


@pytest.mark.parametrize(
    "position",
    [
        Position(task=1),  # nothing was measured of the task before
        Position(task=1, accuracy=[[90.0, 80.0]], matching=[[]]),
        Position(task=1, accuracy=[[90.0]], matching=[[]], confusion=[[1], [2]]),
    ],
)
def test_work_in_progress_that_is_not_of_its_task_is_refused(position: Position, tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    good = Position(task=1, accuracy=[[90.0]], matching=[[]])
    checkpoint.write(kept.task_path(0), {"x": torch.zeros(1)}, asdict(good))
    checkpoint.write(kept.progress_path, {"loss": torch.zeros(())}, asdict(good))
    assert kept.last()[0] == good
    checkpoint.write(kept.progress_path, {"loss": torch.zeros(())}, asdict(position))
    with pytest.raises(DualPromptError, match="it is not that of its task"):
        kept.last()
