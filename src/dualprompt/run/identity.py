"""What decides a run's result, as hashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dualprompt.backbones.weights import CheckpointInfo
from dualprompt.config import EvaluateConfig, RunConfig
from dualprompt.data.stream import Stream
from dualprompt.files import digest
from dualprompt.run.code import code_of

# Carrying a run out elsewhere, saving it more often or showing it to a tracker does not change what it is.
CIRCUMSTANCES = {"device", "devices", "nodes", "checkpoint", "compile", "track"}
# Options that came later: at these values a run is what it was before they existed, and keeps its identity.
ADDED: dict[str, dict[str, Any]] = {
    "benchmark": {"test_per_class": None, "stream": "class"},
    "train": {
        "optimiser": "adam",
        "momentum": 0.9,
        "nesterov": False,
        "schedule": "constant",
        "milestones": [],
        "gamma": 0.1,
        "warmup_epochs": 0,
        "weight_decay": 0.0,
        "decay": "decoupled",
        "rotation": 0.0,
        "jitter": [0.0, 0.0, 0.0, 0.0],
    },
    "method": {
        "head_lr": None,
        "head": "linear",
        "matching": "key",
        "ridge_strength": None,
        "align_steps": 300,
        "align_lr": 0.01,
        "keys_per_task": 5,
        "pool": "shared",
        "warmup_epochs": 0,
        "epochs_factor": 1,
        "zero_residuals": False,
    },
}


@dataclass(frozen=True)
class Identity:
    """What decides a run's result, as hashes."""

    config: str
    data: str
    weights: str
    code: str | None = None  # runs from before it was noted: nobody knows which

    @classmethod
    def of(cls, config: RunConfig, stream: Stream, weights: CheckpointInfo) -> Identity:
        """Return the identity of a run of `config` on this stream with these weights, by the code at hand."""
        return cls(config_digest(config), stream.fingerprint, weights.sha256, code_of(config))


def config_digest(config: RunConfig) -> str:
    """Return the hash of everything in a config that decides the result."""
    if config.method.get("selection") != "batch_vote":  # then it decides nothing how many are evaluated at a time
        evaluate = config.evaluate.model_copy(update={"batch_size": EvaluateConfig().batch_size})
        config = config.model_copy(update={"evaluate": evaluate})
    return digest_of_all(config)


def digest_of_all(config: RunConfig) -> str:
    """Return the hash of a config as it stands, how many images are evaluated at a time included."""
    values = config.model_dump(mode="json", exclude=CIRCUMSTANCES)
    for section, fields in ADDED.items():
        values[section] = {k: v for k, v in values[section].items() if k not in fields or v != fields[k]}
    return digest(values)
