"""What a learner is built on: its config, the frozen backbone and how images are shown; and all that it knows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from dualprompt.backbones import weights
from dualprompt.backbones.base import BackboneFactory
from dualprompt.backbones.weights import CheckpointInfo
from dualprompt.config import RunConfig, parse
from dualprompt.data.augment import normalise
from dualprompt.data.views import View
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS, Batch, Method, MethodConfig, method_config
from dualprompt.model.network import Network, Rows, refuse_larger
from dualprompt.model.outcomes import Outcomes
from dualprompt.model.results import TaskInfo
from dualprompt.run.checkpoint import State
from dualprompt.training.distributed import compute_dtype
from dualprompt.training.setup import view_of


@dataclass(frozen=True)
class Model:
    """All that a learner knows. It is replaced as a whole, so that whoever predicts sees the old one or the new."""

    method: Method
    network: Network
    tasks: tuple[TaskInfo, ...] = ()
    rows: Rows = ()
    next_id: int = 1
    trust: Outcomes = field(default_factory=dict)

    @property
    def state(self) -> State:
        """Its tensors."""
        return self.method.state() if self.tasks else {}


@dataclass(frozen=True)
class Foundation:
    """What does not change while a learner lives."""

    config: RunConfig
    options: MethodConfig
    weights: CheckpointInfo
    device: torch.device
    dtype: torch.dtype
    backbones: BackboneFactory
    view: View

    def method(self, state: State | None = None) -> Method:
        """Return the method, which has learned what `state` holds, or nothing yet."""
        method = METHODS[self.options.name](self.options, self.backbones)
        method.compute_dtype = self.dtype
        method = method.to(self.device)
        method.expect_more()
        if state:
            method.load_state({name: value.to(self.device) for name, value in state.items()})
        return method

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """Return the frozen backbone's features of images, (images, dim), from (images, side, side, 3) uint8."""
        backbone = self.backbones.frozen()
        with torch.inference_mode():
            return backbone(self.batch(pixels).images).float().cpu().numpy()

    def batch(self, pixels: np.ndarray) -> Batch:
        """Return images, (images, side, side, 3) uint8, as a method takes them; nothing is known of their labels."""
        mean, std = (torch.tensor(value, device=self.device) for value in (self.view.mean, self.view.std))
        raw = torch.from_numpy(np.ascontiguousarray(pixels)).to(self.device).permute(0, 3, 1, 2).float() / 255
        shown = normalise(raw, mean, std).to(self.backbones.dtype)
        return Batch(lambda: shown, torch.zeros(len(pixels), dtype=torch.int64, device=self.device))

    def refuse_larger(self, state: State) -> None:
        """Refuse options, which may be a stranger's, that call for larger tensors than those of a state."""
        made = _outline(self.options, self.backbones)
        refuse_larger({name: value for name, value in made.state().items() if name not in made.sized_by_code}, state)

    def model(
        self,
        tasks: tuple[TaskInfo, ...] = (),
        rows: Rows = (),
        next_id: int = 1,
        trust: Outcomes | None = None,
        state: State | None = None,
        method: Method | None = None,
    ) -> Model:
        """Return a model; without arguments, one that knows nothing.

        `tasks`, `rows`, `next_id` and `trust` are what it knows. Its tensors are in `state`, or in a `method` that
        has learned already.
        """
        if method is None:
            method = self.method(state)
        network = Network(method, self.view.mean, self.view.std, rows)
        return Model(method, network, tasks, rows, next_id, trust or {})


def build(values: dict[str, Any], backbone: str, input_size: int | None, device: str, seed: int) -> Foundation:
    """Return what a learner is built on, or say why it cannot be.

    `values` are `method` and `train` of its config; the other arguments are those of `ContinualLearner`.
    """
    network = {"name": weights.absolute_name(backbone), "input_size": input_size}
    common = {"benchmark": {"name": "learner", "dataset": "images"}, "seed": seed, "device": device}
    # Small batches on a CPU are as fast as large ones, and whoever interrupts a pass waits for one at most.
    batch = {"batch_size": 8} if _device(device) == "cpu" else {}
    config: RunConfig = parse(RunConfig, common | {"backbone": network, "evaluate": batch} | values)
    options = method_config(config.method)
    config = config.model_copy(update={"method": options.model_dump(mode="json"), "device": _device(config.device)})
    checkpoint = weights.read(config.backbone.name, seed=seed)
    found, info = torch.device(config.device), checkpoint.info
    dtype = compute_dtype(config, found)
    backbones = weights.factory(checkpoint, input_size=config.backbone.input_size)
    made = _outline(options, backbones)
    if not made.can_forget:
        raise DualPromptError(f"method '{options.name}' does not say what it keeps for a task; take dualprompt")
    if made.trains_backbone or made.joint:
        raise DualPromptError(f"method '{options.name}' trains the backbone or keeps images; take dualprompt")
    backbones.place(found, dtype)
    view = replace(view_of(config, info), test="resize")
    return Foundation(config, options, info, found, dtype, backbones, view)


def _outline(options: MethodConfig, backbones: BackboneFactory) -> Method:
    """Return the method as shapes alone, which take no memory."""
    with torch.device("meta"):
        return METHODS[options.name](options, backbones.outline())


def _device(name: str) -> str:
    if name != "auto":
        if name == "cuda" and not torch.cuda.is_available():
            raise DualPromptError("device: cuda was asked for, but PyTorch sees no GPU; use cpu or auto")
        return name
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
