"""What the files around a checkpoint's tensors say: heads, input size, normalisation, licence."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dualprompt.config import LARGEST_INPUT
from dualprompt.errors import DualPromptError
from dualprompt.files import MOST_JSON, parse_json, read_bytes, reason

Triple = tuple[float, float, float]

_PIL_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


@dataclass(frozen=True)
class Facts:
    """What is written down; None where nothing is."""

    heads: int | None = None
    eps: float | None = None
    gelu: Literal["exact", "quick"] | None = None
    input_size: int | None = None
    mean: Triple | None = None
    std: Triple | None = None
    interpolation: str | None = None
    source: str | None = None
    licence: str | None = None


def from_header(header: Mapping[str, str], where: str) -> Facts:
    """Read the metadata of a safetensors header, whose values are all text."""
    with _explained(where):
        return Facts(
            heads=_positive(header, "num_heads"),
            input_size=_side(header.get("input_size")),
            mean=_triple(header, "mean"),
            std=_triple(header, "std"),
            interpolation=header.get("interpolation"),
            source=header.get("source"),
            licence=header.get("licence", header.get("license")),
        )


def from_folder(folder: Path) -> Facts:
    """Read the `config.json` and `preprocessor_config.json` of a hub repository, timm's or Hugging Face's."""
    config = _json(folder / "config.json")
    with _explained(str(folder / "config.json")):
        if "pretrained_cfg" in config or "architecture" in config:
            return _timm(config)
        facts = _hugging_face(config)
    preprocessor = _json(folder / "preprocessor_config.json")
    with _explained(str(folder / "preprocessor_config.json")):
        return _preprocessed(facts, preprocessor)


def _timm(config: Mapping[str, Any]) -> Facts:
    said = {**config, **(config.get("pretrained_cfg") or {})}
    size = said.get("input_size")
    return Facts(
        heads=_positive(config.get("model_args") or {}, "num_heads"),
        gelu="quick" if "quickgelu" in str(config.get("architecture")) else "exact",
        input_size=_side(size[-1]) if size else None,
        mean=_triple(said, "mean"),
        std=_triple(said, "std"),
        interpolation=_text(said, "interpolation"),
        licence=_text(said, "license"),
    )


def _hugging_face(config: Mapping[str, Any]) -> Facts:
    clip = str(config.get("model_type")).startswith("clip")
    if clip and isinstance(config.get("vision_config"), Mapping):  # beside that of the text
        config = config["vision_config"]
    activation = config.get("hidden_act", "quick_gelu" if clip else "gelu")
    if activation not in ("gelu", "quick_gelu") and not config.get("use_swiglu_ffn"):
        raise ValueError(f"hidden_act must be 'gelu' or 'quick_gelu', found {activation!r:.80}")
    return Facts(
        heads=_positive(config, "num_attention_heads"),
        eps=_epsilon(config.get("layer_norm_eps", 1e-5 if clip else 1e-6)),
        gelu="quick" if activation == "quick_gelu" else "exact",
        input_size=_side(config.get("image_size")),
    )


def _preprocessed(facts: Facts, preprocessor: Mapping[str, Any]) -> Facts:
    size = preprocessor.get("size")
    if preprocessor.get("do_center_crop") and "crop_size" in preprocessor:
        size = preprocessor["crop_size"]
    if isinstance(size, Mapping):
        size = size.get("height", size.get("shortest_edge"))
    mean, std = _triple(preprocessor, "image_mean"), _triple(preprocessor, "image_std")
    if preprocessor.get("do_normalize") is False:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return Facts(
        heads=facts.heads,
        eps=facts.eps,
        gelu=facts.gelu,
        input_size=facts.input_size if size is None else _side(size),
        mean=mean,
        std=std,
        interpolation=_PIL_FILTERS.get(preprocessor.get("resample", -1)),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = parse_json(read_bytes(path, MOST_JSON))
    except (ValueError, OSError) as error:
        raise DualPromptError(f"{path} is not readable JSON ({reason(error)}); download it again") from error
    if not isinstance(value, dict):
        raise DualPromptError(f"{path} must hold a JSON object, found {type(value).__name__}; download it again")
    return value


def _positive(said: Mapping[str, Any], field: str) -> int | None:
    value = said.get(field)
    if value is None:
        return None
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if number < 1:
        raise ValueError(f"{field} must be a positive whole number, found {value!r:.80}")
    return number


def _side(value: Any) -> int | None:
    """Read how many pixels wide and high the images are."""
    number = _positive({"the input size": value}, "the input size")
    if number is not None and number > LARGEST_INPUT:
        raise ValueError(f"the input size must be at most {LARGEST_INPUT} pixels, found {number}")
    return number


def _epsilon(value: Any) -> float:
    number = float(value)
    if not 0 < number < 1:
        raise ValueError(f"layer_norm_eps must be above 0 and below 1, found {value!r:.80}")
    return number


def _text(said: Mapping[str, Any], field: str) -> str | None:
    value = said.get(field)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{field} must be a text, found {value!r:.80}")
    return value


def _triple(said: Mapping[str, Any], field: str) -> Triple | None:
    value = said.get(field)
    if value is None:
        return None
    try:
        red, green, blue = (float(part) for part in (value.split(",") if isinstance(value, str) else value))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{field} must be three numbers, found {value!r:.80}") from None
    if not all(map(math.isfinite, (red, green, blue))):
        raise ValueError(f"{field} must be three finite numbers, found {value!r:.80}")
    if "std" in field and min(red, green, blue) <= 0:
        raise ValueError(f"{field} must be positive, found {value!r:.80}")
    return red, green, blue


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turn a fault in a file's fields into one line that names the file."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise DualPromptError(f"{where}: {str(error)[:200]}; correct the file or download it again") from error
