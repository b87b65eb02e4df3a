"""Plain values that people write: YAML texts within bounds, dotted keys, mappings laid over each other."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import yaml

from dualprompt.errors import DualPromptError

MOST_YAML = 2**18  # bytes
MOST_VALUES = 10_000  # of a YAML text, with every alias written out
TOO_MANY = f"it holds more than {MOST_VALUES:,} values, with every alias written out"
MOST_DIGITS = 400  # of a whole number; of more Python makes some in seconds, and cannot print them
DEEPEST = 32  # levels of a YAML text, and of dotted keys


def read_yaml(text: str) -> Any:
    """Return the value of a YAML text that someone wrote; a ValueError says what is wrong with it, on one line."""
    return copy.deepcopy(_read_yaml(text))  # whoever asks may change it


@functools.lru_cache(maxsize=32)  # a table or a sweep composes hundreds of runs from one preset
def _read_yaml(text: str) -> Any:
    if len(text) > MOST_YAML:
        raise ValueError(f"it is longer than {MOST_YAML:,} characters")
    try:
        depth = 0
        for number, event in enumerate(yaml.parse(text, yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ValueError(f"it is nested more than {DEEPEST} deep")
            if number > 2 * MOST_VALUES:
                raise ValueError(TOO_MANY)
        root = yaml.compose(text, yaml.SafeLoader)
        if root is not None:
            _count_values(root, {})
        return yaml.safe_load(text)
    # Its constructors are not made for hostile texts: 2026-99-99, !!bool x, !!int "" and the like.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return how many values a node stands for; a few aliases can stand for more than any memory holds."""
    if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int") and len(node.value) > MOST_DIGITS:
        raise ValueError(f"a number has more than {MOST_DIGITS} digits")
    if id(node) not in counts:
        counts[id(node)] = MOST_VALUES  # until it is known, so that an alias of what it is part of counts as too much
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for each in inner for part in (each if isinstance(each, tuple) else (each,))]
        counts[id(node)] = 1 + sum(_count_values(part, counts) for part in parts)
    if counts[id(node)] > MOST_VALUES:
        raise ValueError(TOO_MANY)
    return counts[id(node)]


def read_value(text: str) -> Any:
    """Read a value as YAML; `a,b` without brackets is a list too, unless it is quoted or the path of something."""
    try:
        value = read_yaml(text)
        if isinstance(value, str) and "," in value and text[0] not in "\"'" and not _exists(text):
            return [read_yaml(part) for part in value.split(",")]
    except ValueError:
        raise DualPromptError(f"cannot read the value '{text[:200]}'; quote it as YAML") from None
    return value


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # it is too long for a path, or holds a zero byte
        return False


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """Return `{"a": {"b": value}}` for `a.b`."""
    *outer, last = dotted.split(".")
    if len(outer) > DEEPEST:
        raise DualPromptError(f"unknown key '{dotted[:40]}…'; none has {len(outer)} dots")
    result: dict[str, Any] = {last: value}
    for part in reversed(outer):
        result = {part: result}
    return result


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `{"a.b": value}` for `{"a": {"b": value}}`."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return result


def merge(base: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `above` on top, mapping by mapping."""
    result = dict(base)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge(result[key], value) if both else value
    return result
