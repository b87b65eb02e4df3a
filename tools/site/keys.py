"""The reference of every config key and of every method's options, read from the models that check them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dualprompt.config import RunConfig, Strict
from dualprompt.methods.base import METHODS, Method
from dualprompt.values import flat

WORDS = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "null": "null", "object": "mapping"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class Key:
    """A key as a page shows it."""

    name: str  # with dots
    type: str
    default: str
    range: str
    description: str


def keys(model: type[Strict], prefix: str = "") -> Iterator[Key]:
    """Return the keys of a config in their order, those of its sections in their places."""
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Strict):
            yield from keys(section, f"{prefix}{name}.")
            continue
        value = schema["properties"][name]
        yield Key(
            prefix + name,
            type_of(value),
            written(value["default"]) if "default" in value else "required",
            range_of(value),
            value.get("description") or inherited(model, name),
        )


def inherited(model: type[Strict], name: str) -> str:
    """Return what a base of the model says of a key, which gives it another default and no words of its own."""
    bases = [base for base in model.__mro__ if issubclass(base, Strict) and name in base.model_fields]
    return next((found for base in bases if (found := base.model_fields[name].description)), "")


def type_of(schema: Mapping[str, Any]) -> str:
    """Return a type in words: `int`, `list of str`, the values of a choice, or several of these."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(type_of, schema["anyOf"])))
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        members = schema.get("prefixItems") or [schema.get("items", {})]
        count = f"{len(members)} × " if "prefixItems" in schema else "list of "
        return count + " or ".join(dict.fromkeys(map(type_of, members)))
    return WORDS.get(schema.get("type", ""), "any")


def range_of(schema: Mapping[str, Any]) -> str:
    """Return the bounds of a number, or of the numbers in a list; empty where there are none."""
    parts = [schema, *schema.get("anyOf", []), *schema.get("prefixItems", []), schema.get("items", {})]
    found = [", ".join(f"{sign} {number(part[key])}" for key, sign in BOUNDS.items() if key in part) for part in parts]
    return " or ".join(dict.fromkeys(filter(None, found)))


def number(value: float) -> str:
    """Return a bound with as many digits as it has."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def written(value: Any) -> str:
    """Return a default as one writes it on the command line."""
    if value is None:
        return "`null`"
    if isinstance(value, list):
        return f"`{','.join(map(str, value))}`" if value else "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, dict):
        return f"`{', '.join(f'{key}: {each}' for key, each in value.items())}`"
    return f"`{value}`"


def table(found: list[Key]) -> str:
    """Return keys as a Markdown table."""
    lines = ["| key | type | default | range | what it is |", "|---|---|---|---|---|"]
    for key in found:
        cells = (f"`{key.name}`", key.type, key.default, key.range, key.description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def run_config() -> str:
    """Return the keys of a run, a section of the page for each section of the config."""
    sections: dict[str, list[Key]] = {}
    for key in keys(RunConfig):
        sections.setdefault(key.name.partition(".")[0] if "." in key.name else "run", []).append(key)
    parts = []
    for name, found in sections.items():
        about = RunConfig.model_fields[name].annotation if name in RunConfig.model_fields else RunConfig
        title = f"`{name}`" if name != "run" else "The run itself"
        parts.append(f"## {title}\n\n{(about.__doc__ or '') if isinstance(about, type) else ''}\n\n{table(found)}\n")
    return "\n".join(parts)


def methods() -> str:
    """Return all methods, a section each: options, what it brings itself, what it takes."""
    parts = []
    for name in METHODS.names():
        kind: type[Method] = METHODS[name]
        options = [key for key in keys(kind.Config, "method.") if key.name != "method.name"]
        parts.append(f"## `{name}`\n\n{sentence(kind.summary)}\n\n{table(options)}\n\n{traits(kind)}\n")
    return "\n".join(parts)


def traits(kind: type[Method]) -> str:
    """Return in a few lines how a method is trained unless somebody says otherwise, and what it cannot learn from."""
    own = {
        key if key.startswith("train.") else f"method.{key}": value for key, value in flat(dict(kind.defaults)).items()
    }
    lines = []
    if own:
        lines.append("Brings its own: " + ", ".join(f"`{key} {plain(value)}`" for key, value in own.items()) + ".")
    if kind.selections:
        lines.append("Selections: " + ", ".join(f"`{each}`" for each in kind.selections) + ".")
    lines += [
        f"Takes no stream {what}: {reason}."
        for what, reason in (
            ("in which classes come back", kind.needs_new_labels),
            ("without known borders", kind.needs_borders),
        )
        if reason
    ]
    return "\n\n".join(lines)


def plain(value: Any) -> str:
    """Return a value as the command line takes it."""
    return written(value).strip("`")


def sentence(text: str) -> str:
    """Return a phrase as a sentence."""
    return text[0].upper() + text[1:].rstrip(".") + "."
