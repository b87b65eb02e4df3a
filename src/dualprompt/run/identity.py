"""What decides a run's result, as hashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dualprompt.backbones.weights import CheckpointInfo
from dualprompt.config import RunConfig
from dualprompt.data.stream import Stream
from dualprompt.files import digest
from dualprompt.run.code import code_of

# Carrying a run out elsewhere, saving it more often or showing it to a tracker does not change what it is.
CIRCUMSTANCES = {"device", "devices", "nodes", "checkpoint", "compile", "track"}
# Options of a benchmark that came later: one that is not used leaves a run what it was.
LATER = {"first"}


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
    return digest_of(config.model_dump(mode="json"))


def digest_of(values: Mapping[str, Any]) -> str:
    """Return the same of a config as it was written: options that came later are not in it, and do not change it."""
    decides = {key: value for key, value in values.items() if key not in CIRCUMSTANCES}
    if isinstance(benchmark := decides.get("benchmark"), dict):
        decides["benchmark"] = {key: value for key, value in benchmark.items() if value is not None or key not in LATER}
    # Unless a batch decides together, it decides nothing how many images are evaluated at a time.
    if decides.get("method", {}).get("selection") != "batch_vote":
        decides["evaluate"] = {key: value for key, value in decides.get("evaluate", {}).items() if key != "batch_size"}
    return digest(decides)
