"""A run as typed data: strict keys, checked ranges; a YAML preset plus dotted overrides. Records that are read back."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dualprompt.benchmark import BenchmarkConfig
from dualprompt.errors import DamagedError, DualPromptError, nearest
from dualprompt.files import MOST_JSON, read_bytes, reason
from dualprompt.recipe import LARGEST_BATCH, Strict, TrainConfig
from dualprompt.registry import Registry
from dualprompt.values import MOST_YAML, flat, merge, nested, read_value, read_yaml

T = TypeVar("T")
# Bounds of options that memory goes by, far above anything sensible: a file of a stranger must not fill it.
LONGEST = 1000  # rows or tokens of a prompt
WIDEST = 30_000  # random features of a closed-form head, which holds WIDEST²/2 numbers: 1.8 GB
LARGEST_INPUT = 1024  # pixels a side: 4096 patches of 16 × 16, whose attention still fits


# The methods, which fill it when it is first asked; `methods.base` knows what they are.
METHODS: Registry[Any] = Registry(
    "method", "dualprompt.methods", group="dualprompt.methods", needs=("Config", "summary")
)


class Record(BaseModel):
    """Base of every file that we read back: types are exact, numbers finite. What another version added is kept."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)


Count = Annotated[int, Field(ge=0, lt=2**53)]
Percent = Annotated[float, Field(ge=-1e-6, le=100 + 1e-6)]  # which sums may miss by a little
BUFFER_SIZE = "method.buffer_size"  # the option of every rehearsal method


class BackboneConfig(Strict):
    """The frozen network."""

    name: str = Field(default="embedded", description="embedded, a known name, a hub id, or a weights file")
    input_size: int | None = Field(
        default=None, ge=16, le=LARGEST_INPUT, description="pixels a side (default: the checkpoint's)"
    )
    gelu: Literal["exact", "tanh"] = Field(default="exact", description="GELU flavour; the official code uses tanh")


class EvaluateConfig(Strict):
    """How test images are shown and evaluated."""

    batch_size: int = Field(default=128, ge=1, le=LARGEST_BATCH, description="images at a time; decides no result")
    view: Literal["resize", "centre_crop"] = Field(
        default="resize",
        description="whole image squeezed to the input, or short side ·256/224 and the centre cut",
    )
    ahead: int = Field(
        default=500, ge=0, description="images of tasks to come that are shown after each task, for AUROC and FWT"
    )


class CheckpointConfig(Strict):
    """When the run saves itself: so often, at each task's end, and at an epoch's unless it just did (a tenth of it)."""

    every_seconds: float = Field(default=60.0, ge=0, description="least time between two; 0: after every step")


class RunConfig(Strict):
    """Everything that decides a run's result, and how it is carried out."""

    benchmark: BenchmarkConfig
    backbone: BackboneConfig = BackboneConfig()
    method: dict[str, Any] = Field(default={"name": "dualprompt"}, description="name and options of the method")
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    seed: int = Field(default=0, ge=0, description="every random number of the run is drawn from it")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(default="auto", description="auto: a GPU where there is one")
    devices: int = Field(default=1, ge=1, description="processes a machine, one device each")
    nodes: int = Field(default=1, ge=1, description="machines")
    precision: Literal["auto", "fp32", "bf16"] = Field(default="auto", description="auto: bf16 on CUDA, else fp32")
    compile: Literal["auto", "on", "off"] = Field(
        default="auto", description="torch.compile of the backbone; auto: on CUDA where the run is long enough to gain"
    )
    track: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=(), description="tensorboard, wandb or both: where the log is shown as well"
    )


def parse(model: type[Strict], values: dict[str, Any], where: str = "") -> Any:
    """Validate `values` as `model`; the first fault becomes one line that names the key and the remedy."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise DualPromptError(_explain(model, error, where)) from None


def recorded(kind: type[T], content: bytes | str, where: str, remedy: str) -> T:
    """Return the JSON text of a record as the type it must have; its first fault becomes one line.

    `kind` is that type, `content` the text. The line says that `where` is damaged, and ends with the `remedy`.
    """
    try:
        return TypeAdapter(kind).validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        fault = f"'{place}': {message[0].lower()}{message[1:]}" if place else message
        raise DamagedError(f"{where} is damaged ({fault[:200]}); {remedy}") from None


def read_record(path: Path, kind: type[T], remedy: str = "restore it or start a new run") -> T:
    """Return what a JSON file of ours says, as the type it must have."""
    try:
        content = read_bytes(path, MOST_JSON)
    except OSError as error:
        raise DamagedError(f"{path} is damaged ({reason(error)}); {remedy}") from None
    return recorded(kind, content, str(path), remedy)


def _explain(model: type[Strict], error: ValidationError, where: str) -> str:
    faults = error.errors()
    first = faults[0]
    path, owner = _place(model, first["loc"])
    key = ".".join(part for part in (where, *path) if part) or "config"
    if first["type"] == "extra_forbidden":
        return f"unknown key '{key}'; {nearest(path[-1], owner.model_fields)}"
    if first["type"] == "missing":
        return f"missing key '{key}'; set it in the preset or with --{key} VALUE"
    field = owner.model_fields.get(path[-1]) if path else None
    found = repr(first["input"])
    found = f"found {found[:80]}{'…' if len(found) > 80 else ''}"
    if field and field.description and sum(_place(model, fault["loc"])[0] == path for fault in faults) > 1:
        # A union: none of its members fits, and the fault of the first one would mislead.
        return f"bad value for '{key}': {found}; it takes: {field.description}"
    message = first["msg"].removeprefix("Value error, ")
    hint = "; write it as a,b" if first["type"] in ("tuple_type", "list_type") else ""
    found = "" if isinstance(first["input"], dict) else f" ({found})"
    return f"bad value for '{key}': {message[0].lower()}{message[1:]}{found}{hint}"


def _place(model: type[Strict], location: tuple[int | str, ...]) -> tuple[list[str], type[Strict]]:
    """Return the key that a fault is at, and the config it belongs to.

    Below a field, a location holds positions in lists and the tried members of unions, which the user did not write.
    """
    path: list[str] = []
    owner: Any = model
    for part in location:
        path.append(str(part))
        field = owner.model_fields.get(part)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, Strict)):
            break
        owner = field.annotation
    return path, owner


def preset_names() -> list[str]:
    """Return the names of the presets that come with the package."""
    folder = resources.files("dualprompt") / "presets"
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_preset(name: str) -> dict[str, Any]:
    """Return the content of a preset: one that comes with the package, or a YAML file of the user's."""
    if name in preset_names():
        text = (resources.files("dualprompt") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
    elif name.endswith((".yaml", ".yml")):
        if not Path(name).exists():
            raise DualPromptError(f"preset file {name} does not exist")
        try:
            text = read_bytes(Path(name), MOST_YAML).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DualPromptError(f"preset file {name} cannot be read as text ({reason(error)})") from None
    else:
        raise DualPromptError(f"unknown preset '{name}'; {nearest(name, preset_names())}; or the path of a .yaml file")
    try:
        values = read_yaml(text)
    except ValueError as error:
        raise DualPromptError(f"{name} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise DualPromptError(f"{name} must hold a mapping of keys, found {type(values).__name__}")
    return values


def compose(preset: str, recipe: str | None, overrides: dict[str, Any]) -> RunConfig:
    """Return the run that `preset` describes, under one of its recipes, with dotted `overrides` on top.

    The recipe's training values are for every method. Above them are those that a method brings itself, then what the
    preset says of that method; see `_layers`.
    """
    values: dict[str, Any] = {}
    for _, layer in _layers(preset, recipe, overrides):
        values = merge(values, layer)
    return parse(RunConfig, values)


def origins(preset: str, recipe: str | None, overrides: dict[str, Any]) -> dict[str, str]:
    """Return where each value of `train` and `method` comes from that `compose` was given, by its dotted key.

    One of `recipe`, `preset`, `method` (its own defaults) and `command line`.
    """
    found: dict[str, str] = {}
    for origin, layer in _layers(preset, recipe, overrides):
        known = flat({key: value for key, value in layer.items() if key in ("train", "method")})
        found |= {key: origin for key in known if key not in ("method.name", "train.recipe")}
    return found


def _layers(preset: str, recipe: str | None, overrides: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return what a run's config is made of, each layer above the one before, and where it comes from.

    Where the preset itself names the method, its training values are meant for that one, and stand above the
    method's own.
    """
    values, chosen = _under_recipe(preset, recipe)
    above = _all_nested(overrides)
    if chosen is not None and any(changes_recipe(dotted) for dotted in overrides):
        above = merge({"train": {"recipe": f"{chosen}, changed"}}, above)
    common = {key: value for key, value in values.items() if key not in ("method", "methods")}
    method = _method(preset, values, above)
    layers = [("preset" if chosen is None else "recipe", common), ("method", as_layer(own_defaults(method["name"])))]
    if values.get("method", {}).get("name") == method["name"]:
        layers.reverse()
    return [*layers, ("preset", as_layer(method)), ("command line", above)]


def own_defaults(method: str) -> dict[str, Any]:
    """Return what a method brings itself, as a preset would say it under `methods:`; nothing for one unknown."""
    return dict(METHODS[method].defaults) if method in METHODS else {}


def as_layer(method: dict[str, Any]) -> dict[str, Any]:
    """Return what is said of a method, training values among its options, as part of a config."""
    options = {key: value for key, value in method.items() if key != "train"}
    return {"method": options} | ({"train": method["train"]} if "train" in method else {})


def compose_beside(preset: str, recipe: str | None, overrides: dict[str, Any], method: str) -> RunConfig:
    """Return the run of `method` in the place of the one that `compose` returns, with training values of its own.

    What is common stays: of the overrides, only those go that set options of the other method, or training values
    that the preset or the method itself gives to that one alone.
    """
    values, _ = _under_recipe(preset, recipe)
    other = _method(preset, values, _all_nested(overrides))
    own = merge(own_defaults(other["name"]), other).get("train", {})
    theirs = {f"train.{key}" for key in own}
    kept = {key: value for key, value in overrides.items() if key.split(".")[0] != "method" and key not in theirs}
    return compose(preset, recipe, kept | {"method.name": method})


def _under_recipe(preset: str, recipe: str | None) -> tuple[dict[str, Any], str | None]:
    """Return the values of a preset with those of a recipe on top, and which recipe that is."""
    values = load_preset(preset)
    recipes = _mapping(preset, "recipes", values.pop("recipes", {}))
    default = values.pop("recipe", None)
    values.pop("title", None)
    chosen = recipe or default
    if chosen is not None:
        if not isinstance(chosen, str) or chosen not in recipes:
            known = nearest(str(chosen), map(str, recipes))
            raise DualPromptError(f"preset '{preset}' has no recipe '{str(chosen)[:80]}'; {known}")
        values = merge(values, _mapping(preset, f"recipes.{chosen}", recipes[chosen]))
        values = merge(values, {"train": {"recipe": chosen}})
    return values, chosen


def _method(preset: str, values: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return what a preset says of the method that is named above it, or else in it; `train` is among the options.

    A preset may hold options for several methods; only those of the chosen one apply.
    """
    options = _mapping(preset, "methods", values.get("methods", {}))
    own = _mapping(preset, "method", values.get("method", {}))
    usual = own.get("name", "dualprompt")
    name = above.get("method", {}).get("name", usual)
    if not isinstance(name, str):
        raise DualPromptError(f"bad value for 'method.name': it takes the name of a method (found {name!r:.80})")
    method = {"name": name, **_mapping(preset, f"methods.{name}", options.get(name, {}))}
    if name == usual:
        method = merge(method, own)
    if "train" in method:
        _mapping(preset, f"methods.{name}.train", method["train"])
    return method


def _mapping(preset: str, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DualPromptError(f"{preset}: '{key}' must be a mapping of keys, found {value!r:.80}")
    return value


def changes_recipe(dotted: str) -> bool:
    """Return whether an override changes what a recipe says, so that a run must not carry its name alone.

    How many images may be kept is a condition of the comparison, as the benchmark is; how many are evaluated at a time
    decides nothing.
    """
    same = ("method.name", BUFFER_SIZE, "evaluate.batch_size")
    return dotted.split(".")[0] in ("train", "evaluate", "method") and dotted not in same


def _all_nested(overrides: dict[str, Any]) -> dict[str, Any]:
    above: dict[str, Any] = {}
    for dotted, value in overrides.items():
        above = merge(above, nested(dotted, value))
    return above


def read_line(text: str) -> tuple[str, dict[str, Any]]:
    """Read a line of a comparison, NAME:OPTION=VALUE:train.OPTION=VALUE, as --methods says it: method and overrides."""
    name, *options = text.split(":")
    overrides = {}
    for option in filter(None, options):
        key, equals, value = option.partition("=")
        if not equals:
            raise DualPromptError(f"--methods: write an option as name:option=value, found '{text}'")
        overrides[key if key.startswith("train.") else f"method.{key}"] = read_value(value)
    return name, overrides
