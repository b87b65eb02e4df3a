"""The `dualprompt` command: its subcommands are in `commands/`. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualprompt import __version__, completion
from dualprompt.commands import (
    change,
    check,
    evaluate,
    look,
    models,
    predict,
    runs,
    ship,
    studies,
    tables,
    watch,
)
from dualprompt.commands.common import Commands, Parser, dotted_options
from dualprompt.errors import DualPromptError, InterruptedRunError, LostProcessError, nearest, one_line
from dualprompt.progress import speaks
from dualprompt.threads import wait_asleep

GROUPS = {
    "run benchmarks": ("run", "resume", "table", "sweep", "study"),
    "look at results": ("show", "evaluate", "compare", "report", "publish"),
    "teach a model with your own images": ("check", "learn", "more", "predict", "watch", "info", "calibrate"),
    "change a model": ("rename", "merge", "forget", "versions", "rollback"),
    "serve and share a model": ("serve", "export", "push", "pull"),
    "other": ("list", "data", "bench", "completion"),
}
EXAMPLES = """\
examples:
  dualprompt run mini                                      five small tasks of real pictures, no download
  dualprompt run split-cifar100 --backbone embedded --recipe official --out runs/cifar
  dualprompt resume runs/cifar                             continue after a kill, to the same result
  dualprompt report runs/cifar                             one HTML page about a run, several, or a study
  dualprompt table main --benchmark mini --seeds 3         every method, beside the paper's numbers
  dualprompt study ablation mini                           one of the paper's studies, with its figures

  dualprompt learn my-model photos/january                 teach it a folder of class folders
  dualprompt predict my-model picture.jpg more-pictures/
  dualprompt evaluate my-model photos/test
  dualprompt forget my-model january
  dualprompt rollback my-model                             undo the last change
  dualprompt serve my-model                                a page and an HTTP API on this machine

`dualprompt COMMAND --help` has more for each. Results go to stdout, as tables or with --json; all else to stderr.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    if argv is None:  # else whoever called us has torch already, and a mind of their own
        wait_asleep()
    code = answer(list(sys.argv[1:] if argv is None else argv))
    torch = sys.modules.get("torch") if argv is None else None  # with argv, whoever called us goes on
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        # PyTorch's communication threads sometimes abort Python's clean-up at the end of a process (pytorch issue
        # 190489), and one process that ends so takes the others with it: end without the clean-up.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def answer(arguments: list[str]) -> int:
    """Do what the arguments ask; mistakes become one line."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # whoever started us closed it
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may hold anything
    if not sys.warnoptions:  # one picture can have a remark for each of 60,000 tags; what is wrong with it, we say
        warnings.filterwarnings("ignore", module="PIL")
    try:
        try:
            options = parse(arguments)
            options.do(options)
        except SystemExit as end:  # of --help, and of rich where nobody reads its tables
            if isinstance(end.__context__, BrokenPipeError):
                raise end.__context__ from None
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except DualPromptError as error:
        if speaks() or not isinstance(error, InterruptedRunError | LostProcessError):
            complain(f"error: {error}")
        return 130 if isinstance(error, InterruptedRunError) else 2
    except KeyboardInterrupt:
        complain("stopped")
        return 130
    except BrokenPipeError:  # whoever read our output has gone
        abandon_output()
        return 141
    except OSError as error:
        if error.filename is None:
            abandon_output()
        where = error.filename or "the output"
        complain(f"error: {one_line(str(where))} cannot be read or written ({error.strerror or error})")
        return 2
    return 0


def complain(text: str) -> None:
    """Say something on stderr, if that can be had."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"dualprompt: {text}\n")
        sys.stderr.flush()


def abandon_output() -> None:
    """Give up stdout, so that Python does not try it again when it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; `--a.b VALUE` pairs are collected as overrides."""
    overrides, rest = split_overrides(arguments)
    parser, commands = build_parser()
    if not arguments:
        parser.print_help(sys.stdout)
        raise SystemExit(2)
    if rest and not rest[0].startswith("-") and rest[0] not in commands:
        raise DualPromptError(f"unknown command '{rest[0]}'; {nearest(rest[0], commands.abouts)}")
    options, unknown = parser.parse_known_args(rest)
    if unknown:
        flags = [flag for flag in unknown if flag.startswith("-")]
        if not flags or not options.takes_overrides:
            raise DualPromptError(f"unknown argument '{unknown[0]}'; see dualprompt {options.command} --help")
        raise DualPromptError(
            f"unknown option '{flags[0]}'; {nearest_option(flags[0], commands.flags(options.command))}"
        )
    if overrides and not options.takes_overrides:
        *most, last = (f"`{name}`" for name in commands.with_overrides())
        raise DualPromptError(f"'--{next(iter(overrides))}' only goes with {', '.join(most)} and {last}")
    options.overrides, options.words = overrides, arguments
    return options


def split_overrides(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Take `--a.b VALUE` and `--a.b=VALUE` out of the arguments."""
    overrides: dict[str, Any] = {}
    rest: list[str] = []
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        key, equals, value = word.partition("=")
        if not key.startswith("--") or "." not in key:
            rest.append(word)
            continue
        if not equals:
            if not queue:
                raise DualPromptError(f"option '{key}' needs a value")
            value = queue.pop(0)
        from dualprompt.values import read_value  # which takes a while to import

        overrides[key.removeprefix("--")] = read_value(value)
    return overrides, rest


def nearest_option(flag: str, flags: list[str]) -> str:
    """Return a phrase that helps someone who mistyped a flag of a command or left out its group."""
    name = flag.lstrip("-").partition("=")[0]
    dotted = list(dotted_options())
    close = [option for option in dotted if option.endswith(f".{name}")]
    return f"did you mean '--{close[0]}'?" if close else nearest(name, [*flags, *dotted])


def build_parser() -> tuple[Parser, Commands]:
    """Return the parser of the whole command, and its subcommands."""
    parser = Parser(
        prog="dualprompt",
        usage="dualprompt [-h] [--version] COMMAND ...",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dualprompt {__version__}")
    commands = Commands(parser)
    for module in (runs, tables, studies, look, check, models, evaluate, predict, change, watch, ship, completion):
        module.add(commands)
    listed = [
        "\n".join([f"{title}:", *(f"    {name:<12}{commands.abouts[name]}" for name in group)])
        for title, group in GROUPS.items()
    ]
    parser.description = "\n\n".join(["Prompt-based continual learning with a frozen Vision Transformer.", *listed])
    return parser, commands


if __name__ == "__main__":
    raise SystemExit(main())
