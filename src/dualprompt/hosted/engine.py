"""What computes the answers: PyTorch, or ONNX Runtime, on request with 8-bit weights (extra: export)."""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dualprompt import export
from dualprompt.data.datasets.mini import FILE, SHA256
from dualprompt.errors import DualPromptError
from dualprompt.files import packaged
from dualprompt.learner import ContinualLearner

PROBES = 50  # pictures of `mini` on which an engine is compared with PyTorch, where no labelled ones are given

Name = Literal["torch", "onnx"]


@dataclass(frozen=True)
class Engine:
    """What computes; `check` is a folder of labelled pictures to measure the change of accuracy on."""

    name: Name = "torch"
    int8: bool = False
    check: Path | None = None

    def __post_init__(self) -> None:
        if self.name == "torch" and (self.int8 or self.check):
            raise DualPromptError("--int8 and --check go with --engine onnx")

    @property
    def words(self) -> str:
        """What people call it."""
        return "PyTorch" if self.name == "torch" else f"ONNX Runtime{', 8-bit weights' if self.int8 else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as clients see it."""
        return {"name": self.name, "int8": self.int8}


TORCH = Engine()


@dataclass(frozen=True)
class Agreement:
    """How an engine answers beside PyTorch with the same weights."""

    comparison: export.Comparison
    pictures: str  # which they are

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self.comparison) | {"folder": None, "pictures": self.pictures}

    def sentence(self) -> str:
        """Say it."""
        found = self.comparison
        if found.before is not None:
            return found.sentence()
        same = found.images - found.changed
        return (
            f"{same} of {found.images} {self.pictures} get the label that PyTorch gives them; what that means for "
            "accuracy is told for labelled pictures: --check FOLDER"
        )


class OnnxNetwork(nn.Module):
    """A learner's network as ONNX Runtime computes it, one picture at a time.

    In int8 the range of activations is taken over a batch; alone, a picture's answer does not depend on the others.
    """

    def __init__(self, predict: export.Predictor, classes: Sequence[str]) -> None:
        super().__init__()
        self.predict, self.classes = predict, tuple(classes)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map (batch, side, side, 3) uint8 to logits, matched task and similarity, as `model.network.Network` does."""
        found = [self.predict(image[None]) for image in pixels.numpy()]
        joined = [np.concatenate([each[name] for each in found]) for name in ("logits", "task", "similarity")]
        logits, task, similarity = (torch.from_numpy(values) for values in joined)
        return logits, task, similarity


def faster(learner: ContinualLearner, engine: Engine, work: Path) -> tuple[ContinualLearner, Agreement]:
    """Return the learner with its network computed by ONNX Runtime, and how that answers beside PyTorch.

    `work` is a folder for the file, which is removed.
    """
    file = work / "engine.onnx"
    try:
        export.export(learner, file, int8=engine.int8)
        predict = export.open_exported(file)
    finally:
        file.unlink(missing_ok=True)
    if engine.check is not None:
        sample, pictures = export.sample(learner, engine.check), f"pictures of {engine.check.name}"
    else:
        sample, pictures = _probes(), "pictures of the package's 'mini' (not of its classes)"
    agreement = Agreement(export.compare(learner, predict, sample), pictures)
    made = copy.copy(learner)
    made._model = replace(learner._model, network=OnnxNetwork(predict, learner.classes))
    return made, agreement


def _probes() -> export.Sample:
    """Return some of the real pictures that come with the package, of every domain."""
    with zipfile.ZipFile(packaged(FILE, SHA256)) as pack:
        held = [name for name in pack.namelist() if name.split("/")[1] == "test"]
        return export.Sample([pack.read(name) for name in held[:: max(1, len(held) // PROBES)][:PROBES]])
