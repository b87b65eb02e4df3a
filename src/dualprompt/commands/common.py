"""What subcommands share: their parser, options in common, reading of values, and printing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dualprompt.errors import DualPromptError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from rich.table import Table

    from dualprompt.lessons import sharded
    from dualprompt.report.columns import Measure
    from dualprompt.report.sheet import Sheet
    from dualprompt.sweeps.obtained import Workers

Do = Callable[[argparse.Namespace], None]
Options = argparse._ActionsContainer  # a parser, or a group of its options

WHERE = "where it runs"
WRITTEN = "what is written"
BACKBONE = "embedded, a known name, a hub id, or a weights file"
DEVICE = "auto, cpu, cuda or mps"
PRECISION = "auto (bf16 on a GPU that has it, else fp32), fp32 or bf16"


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise DualPromptError(f"{message}; see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help; unlike the original, what the disk or a pipe refuses is no secret."""
        output = file or sys.stderr
        output.write(message)
        output.flush()


class Commands:
    """The subcommands of a parser, and which of them take dotted options of the config."""

    def __init__(self, parser: Parser) -> None:
        self._parsers = parser.add_subparsers(
            prog=parser.prog, required=True, metavar="COMMAND", help=argparse.SUPPRESS
        )
        self.abouts: dict[str, str] = {}  # a line for each, by its name

    def add(
        self, name: str, do: Do, about: str, examples: str, *, overrides: bool = False, alias: str | None = None
    ) -> Parser:
        """Add a subcommand.

        Args:
            name: of the subcommand.
            do: carries it out.
            about: a line that says what it does.
            examples: what is said below its options; some of it are lines to copy.
            overrides: whether it takes `--a.b VALUE`.
            alias: another name, which help does not mention.
        """
        sub = self._parsers.add_parser(
            name,
            aliases=[alias] if alias else [],
            description=f"{about[0].upper()}{about[1:]}.",
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.abouts[name] = about
        sub.set_defaults(do=do, command=name, takes_overrides=overrides)
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
        return sub

    def __getitem__(self, name: str) -> Parser:
        """Return the parser of a subcommand."""
        return self._parsers.choices[name]

    def __contains__(self, name: str) -> bool:
        return name in self._parsers.choices

    def flags(self, name: str) -> list[str]:
        """Return the undotted options of a subcommand."""
        return [flag[2:] for action in self[name]._actions for flag in action.option_strings if flag[:2] == "--"]

    def with_overrides(self) -> list[str]:
        """Return the subcommands that take dotted options."""
        return [name for name in self.abouts if self[name].get_default("takes_overrides")]


def add_devices(command: Parser) -> Options:
    """Add the options that say where a run is carried out; return their group."""
    where = command.add_argument_group(WHERE)
    where.add_argument("--device", help=DEVICE)
    where.add_argument("--devices", type=int, help="processes a machine, one device each")
    where.add_argument("--nodes", type=int, help="machines")
    return where


def add_track(command: Options) -> None:
    """Add the option that shows a run's log elsewhere as well."""
    command.add_argument("--track", help="show the log in tensorboard, wandb, or both with a comma; or none")


def trackers(options: argparse.Namespace) -> list[str] | None:
    """Return what `--track` says, if anything."""
    return None if options.track is None else [name for name in names(options.track) if name != "none"]


def add_publish(command: Options) -> None:
    """Add the option that writes what is published."""
    command.add_argument(
        "--publish", type=Path, metavar="FILE.json", help="also write every run and number, without paths, to this file"
    )


def add_columns(command: Options) -> None:
    """Add the option that says which numbers a table has."""
    command.add_argument(
        "--columns", metavar="A,F,ECE", help="the table's columns, with commas, or all: see docs/metrics.md"
    )


def chosen_columns(options: argparse.Namespace) -> list[Measure]:
    """Return the columns that are asked for; none: the table's own."""
    from dualprompt.report.columns import chosen

    return chosen(names(options.columns))


def add_store(command: Parser) -> Options:
    """Add the options of commands that run many runs or reuse them; return the group of those that say which."""
    kept = command.add_argument_group("runs that are there already")
    kept.add_argument("--runs", type=Path, help="folder that holds the runs (default: $DUALPROMPT_RUNS or runs)")
    kept.add_argument(
        "--fresh", action="store_true", help="run everything anew; what is there already is moved to RUNS/aside"
    )
    where = command.add_argument_group(WHERE)
    where.add_argument("--device", help=DEVICE)
    where.add_argument("--precision", help=PRECISION)
    where.add_argument("--jobs", type=int, default=1, help="runs at a time, each in a process of its own (default: 1)")
    add_ray(
        where,
        "carry the runs out on the Ray cluster at HOST:PORT, or auto; without an address on a new one, of all cores of "
        "this machine",
    )
    where.add_argument("--ray-cpus", type=int, metavar="N", help="CPUs and threads of a run on Ray (default: 1)")
    where.add_argument(
        "--ray-gpus",
        type=float,
        metavar="N",
        help="GPUs of a run on Ray, 0.5 if two may share one (default: 1 if the device is a GPU)",
    )
    return kept


def add_choice(command: Options) -> None:
    """Add the options that choose recipe and backbone."""
    command.add_argument("--recipe", help="one of the preset's recipes (`dualprompt list presets`)")
    command.add_argument("--backbone", help=BACKBONE)


def add_ray(command: Options, text: str) -> None:
    """Add the option that names a Ray cluster; `text` says what for."""
    command.add_argument("--ray", nargs="?", const="local", type=ray_address, metavar="ADDRESS", help=text)


def ray_address(text: str) -> str:
    """Read where a Ray cluster is."""
    if text in ("auto", "local") or text.rpartition(":")[2].isdigit():
        return text
    raise argparse.ArgumentTypeError(f"'{text}' is not HOST:PORT or auto; without an address, put --ray last")


def add_shards(command: Options) -> None:
    """Add the option that spreads the pass over a lesson's images."""
    add_ray(
        command,
        "let the Ray cluster at HOST:PORT, or auto, look at the images, which all its machines must see; without an "
        "address a new one, of all cores of this machine. No prompts are trained",
    )


def shards(options: argparse.Namespace) -> AbstractContextManager[sharded.Map | None]:
    """Return what maps a function over shards of a lesson's images: on a Ray cluster, or None."""
    if options.ray is None:
        return nullcontext(None)
    if options.prompts == "always" or options.minutes is not None:
        flag = "--minutes" if options.minutes is not None else "--prompts always"
        raise DualPromptError(f"{flag} cannot go with --ray, where no prompts are trained; leave one of them out")
    from dualprompt.sweeps.cluster import shards_on

    return shards_on(options.ray)


def workers(options: argparse.Namespace) -> AbstractContextManager[int | Workers]:
    """Return what carries many runs out: so many processes, or a Ray cluster."""
    if options.ray is None:
        if (options.ray_cpus, options.ray_gpus) != (None, None):
            raise DualPromptError("--ray-cpus and --ray-gpus go with --ray")
        return nullcontext(options.jobs)
    if options.jobs != 1 and getattr(options, "study", None) != "auto":  # which proposes so many settings at a time
        raise DualPromptError("--jobs counts processes of this machine; leave it out, Ray fills the cluster by itself")
    from dualprompt.sweeps.cluster import cluster

    return cluster(options.ray, 1 if options.ray_cpus is None else options.ray_cpus, options.ray_gpus)


def many_overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Return the overrides of a command that runs several methods."""
    if "method.name" in options.overrides:
        raise DualPromptError("choose methods with --methods, not --method.name")
    flags: dict[str, Any] = {
        "backbone.name": options.backbone,
        "device": options.device,
        "precision": options.precision,
        "track": trackers(options),
    }
    return options.overrides | {key: value for key, value in flags.items() if value is not None}


def dotted_options(methods: bool = True, method: str | None = None) -> dict[str, FieldInfo]:
    """Return the fields of the config by their dotted names; of all methods, of one, or of none, which loads faster."""
    from dualprompt.config import RunConfig, Strict

    groups = {key: field.annotation for key, field in RunConfig.model_fields.items()}
    configs = [(key, group) for key, group in groups.items() if isinstance(group, type) and issubclass(group, Strict)]
    if methods:
        from dualprompt.methods.base import METHODS

        asked = [method] if method is not None and method in METHODS else METHODS.names()
        configs += [("method", METHODS[name].Config) for name in asked]
    return {f"{key}.{name}": field for key, config in configs for name, field in config.model_fields.items()}


def names(text: str | None) -> list[str]:
    """Read names with commas between them, each once."""
    return list(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def sizes(text: str | None, option: str = "--buffers") -> list[int]:
    """Read numbers of images with commas between them."""
    try:
        found = [int(part) for part in names(text)]
    except ValueError:
        raise DualPromptError(f"{option} takes numbers of images as 1000,5000, found '{text}'") from None
    if any(size < 1 for size in found):
        raise DualPromptError(f"{option} takes numbers of at least 1, found '{text}'")
    return found


def emit(options: argparse.Namespace, value: Any, *tables: Table | str) -> None:
    """Print one JSON value, or tables."""
    if options.json:
        sys.stdout.write(json.dumps(value, indent=2) + "\n")
        return
    from rich.console import Console

    from dualprompt.report.sheet import Harmless
    from dualprompt.report.tables import wide
    from dualprompt.texts import visible

    console = Console()
    if not console.is_terminal:
        console = Console(width=wide(*(table for table in tables if not isinstance(table, str))))
    for table in tables:
        if isinstance(table, str):
            console.print(visible(table), markup=False, emoji=False, highlight=False, soft_wrap=True)
        else:
            console.print(Harmless(table))


def to_width(draw: Callable[[bool], Table]) -> Table:
    """Return the table that `draw(brief)` makes, brief where the terminal is too narrow for all of its columns."""
    from rich.console import Console

    from dualprompt.report.tables import wide

    console, table = Console(), draw(False)
    return draw(True) if console.is_terminal and wide(table) > console.width else table


def sheet_to_width(sheet: Sheet) -> Table:
    """Return a sheet for the terminal, without its lesser columns where that is too narrow for them."""
    from dualprompt.report.sheet import as_rich

    return to_width(lambda brief: as_rich(sheet, brief))
