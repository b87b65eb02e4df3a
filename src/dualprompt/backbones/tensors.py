"""Reads the tensors of a weights file: nothing in it is run, and nothing larger than it is is made."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dualprompt.backbones.layouts import SUPPORTED
from dualprompt.data.arrays import BROKEN, read_arrays
from dualprompt.errors import DualPromptError
from dualprompt.files import regular

_WRAPPERS = ("teacher", "state_dict", "model_state_dict", "model", "student")


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a weights file as they are, and its header's metadata."""
    loader = LOADERS.get(path.suffix)
    if loader is None:
        raise DualPromptError(f"{path} is no weights file; supported endings: {', '.join(LOADERS)}")
    try:
        with regular(path) as handle:
            if handle.read(24).startswith(b"version https://git-lfs"):
                raise DualPromptError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
        tensors, header = loader(path)
    except OSError as error:
        raise DualPromptError(
            f"{path} cannot be read ({error.strerror or error}); check it or download it again"
        ) from error
    except pickle.UnpicklingError as error:
        foreign = re.search(r"GLOBAL ([\w.]+)", str(error))
        if foreign is None:
            raise DualPromptError(f"{path} is damaged or no weights file; download it again") from error
        raise DualPromptError(
            f"{path} holds more than tensors ({foreign[1]}); nothing of it was run; give its state dict "
            "alone, best as .safetensors"
        ) from error
    except (SafetensorError, *BROKEN) as error:
        raise DualPromptError(
            f"{path} is damaged or no weights file ({first_line(error)}); download it again"
        ) from error
    _refuse_strange(tensors, path)
    return tensors, header


def first_line(error: Exception) -> str:
    """Return the first line of what another library says."""
    return str(error).strip().partition("\n")[0][:200]


def _refuse_strange(raw: Mapping[str, Tensor], path: Path) -> None:
    """Refuse what no weights are, and views that stand for far more numbers than the file holds."""
    for name, value in raw.items():
        if value.layout != torch.strided or value.is_quantized or value.is_complex() or value.device.type != "cpu":
            raise DualPromptError(f"{path}: tensor '{name}' is no plain array of numbers; {SUPPORTED}")
    if sum(value.numel() * value.element_size() for value in raw.values()) > _room(path):
        raise DualPromptError(f"{path} stands for far more numbers than it holds; use an undamaged file")


def _room(path: Path) -> int:
    """Return how many bytes a file of this size may stand for: weights hardly shrink when they are packed."""
    return max(64 * 2**20, 10 * path.stat().st_size)


def _load_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as handle:
        # Copies: the library's tensors are the file itself, and change, or end the process, if someone writes to it.
        return {key: handle.get_tensor(key).clone() for key in handle.keys()}, handle.metadata() or {}  # noqa: SIM118


def _load_torch(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    content: Any = torch.load(path, map_location="cpu", weights_only=True)
    while isinstance(content, Mapping):
        inner = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping):
        raise ValueError(f"expected a state dict, found {type(content).__name__}")
    for key, value in content.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"entry '{key}' of the state dict is no tensor but {type(value).__name__}")
    return {str(key): value for key, value in content.items()}, {}


def _load_npz(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with regular(path) as file:
        return {key: torch.from_numpy(value) for key, value in read_arrays(file, _room(path)).items()}, {}


LOADERS: dict[str, Callable[[Path], tuple[dict[str, Tensor], dict[str, str]]]] = {
    ".safetensors": _load_safetensors,
    ".pth": _load_torch,
    ".pt": _load_torch,
    ".bin": _load_torch,
    ".tar": _load_torch,  # as MoCo v3 calls its files, .pth.tar, which are none
    ".npz": _load_npz,
}
