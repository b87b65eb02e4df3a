"""`completion`: a shell asks for the words that may come next; they are worked out from the parsers themselves."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from dualprompt.commands.common import Commands, dotted_options, emit

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

COMPLETION = """\
With it the Tab key completes commands, options, dotted options and their values, and names of presets, methods and
backbones. It works in new shells, and with later versions of dualprompt too.

examples:
  dualprompt completion bash >> ~/.bashrc
  dualprompt completion zsh >> ~/.zshrc
  dualprompt completion fish > ~/.config/fish/completions/dualprompt.fish
"""
# Each asks `completion SHELL --words`, with the words so far on stdin, one a line. A word that ends in a dot is the
# beginning of an option. Where there is no answer, the shell offers files.
SCRIPTS = {
    "bash": """\
_dualprompt() {
    local word program="${COMP_WORDS[0]/#\\~/$HOME}"
    COMPREPLY=()
    while IFS= read -r word; do
        COMPREPLY+=("$word")
    done < <(printf '%s\\n' "${COMP_WORDS[@]:1:COMP_CWORD}" | "$program" completion bash --words 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *. ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -o default -F _dualprompt dualprompt
""",
    "zsh": """\
_dualprompt() {
    local line
    local -a found whole parts
    found=("${(@f)$(printf '%s\\n' "${(@)words[2,CURRENT]}" | ${~words[1]} completion zsh --words 2>/dev/null)}")
    for line in $found; do
        case ${line%%:*} in
            '') ;;
            *.) parts+=("$line") ;;
            *) whole+=("$line") ;;
        esac
    done
    if (( ! $#whole && ! $#parts )); then
        _files
        return
    fi
    (( $#whole )) && _describe dualprompt whole
    (( $#parts )) && _describe 'options of the config' parts -S ''
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _dualprompt dualprompt
""",
    "fish": """\
function __dualprompt
    set -l words (commandline -opc) (commandline -ct)
    set -l found (printf '%s\\n' $words[2..-1] | $words[1] completion fish --words 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c dualprompt -f -a '(__dualprompt)'
""",
}
Word = tuple[str, str]  # and what it means


def add(commands: Commands) -> None:
    """Add this subcommand."""
    about = "print a completion script for a shell"
    command = commands.add("completion", lambda options: do_completion(options, commands), about, COMPLETION)
    command.add_argument("shell", choices=tuple(SCRIPTS), help="which shell")
    command.add_argument(
        "--words", dest="asked", action="store_true", help=argparse.SUPPRESS
    )  # the shell's own question


def do_completion(options: argparse.Namespace, commands: Commands) -> None:
    """Print a script, or answer it."""
    if not options.asked:
        script = SCRIPTS[options.shell]
        emit(options, {"shell": options.shell, "script": script}, script.rstrip("\n"))
        return
    found = following(sys.stdin.read().split("\n")[:-1], commands)
    forms: dict[str, Callable[[str, str], str]] = {
        "bash": lambda word, _: word,
        "zsh": lambda word, means: ":".join(filter(None, (word.replace(":", r"\:"), means))),
        "fish": lambda word, means: f"{word}\t{means}",
    }
    sys.stdout.writelines(f"{forms[options.shell](*each)}\n" for each in found)


def following(words: Sequence[str], commands: Commands) -> list[Word]:
    """Return what the last word may become, after those before it."""
    *before, last = words or [""]
    name = next((word for word in before if word in commands), None)
    found: Iterable[Word]
    if name is None:
        found = [*commands.abouts.items(), ("--help", ""), ("--version", "")]
    else:
        parser = commands[name]
        rest = before[before.index(name) + 1 :]
        dotted = bool(parser.get_default("takes_overrides"))
        found = _of_command(parser._actions, rest, last, dotted)
    return sorted(
        (word, means) for word, means in found if word.startswith(last) and word.startswith("-") <= (last[:1] == "-")
    )


def _of_command(actions: Sequence[argparse.Action], before: Sequence[str], last: str, dotted: bool) -> Iterable[Word]:
    """Return what may come after the words of a subcommand."""
    flags = {flag: action for action in actions for flag in action.option_strings}
    previous = before[-1] if before else ""
    if previous in flags and flags[previous].nargs != 0:
        return _values(flags[previous])
    if previous.startswith("--") and "." in previous and dotted:
        field = _fields(previous, before).get(previous.removeprefix("--"))
        return [] if field is None else [(word, "") for word in _literals(field.annotation)]
    if last.startswith("-"):
        shown = [(flag, action) for flag, action in flags.items() if action.help != argparse.SUPPRESS]
        own = [(flag, (action.help or "") % vars(action)) for flag, action in shown]
        return [*own, *(_dotted(last, before) if dotted else ())]
    positional = [action for action in actions if not action.option_strings]
    taken = sum(1 for number, word in enumerate(before) if not _belongs(word, before[:number], flags))
    if taken >= len(positional) and (not positional or positional[-1].nargs != "+"):
        return []
    return _values(positional[min(taken, len(positional) - 1)])


def _belongs(word: str, before: Sequence[str], flags: dict[str, argparse.Action]) -> bool:
    """Return whether a word is an option or the value of one."""
    previous = before[-1] if before else ""
    takes = previous in flags and flags[previous].nargs != 0
    return word.startswith("-") or takes or (previous.startswith("--") and "." in previous and "=" not in previous)


def _dotted(last: str, before: Sequence[str]) -> Iterable[Word]:
    """Return dotted options: their groups first, and those of a group when it is there."""
    if "." not in last:
        return [
            (f"--{group}.", f"options of {group}") for group in ("benchmark", "backbone", "method", "train", "evaluate")
        ]
    return [(f"--{key}", field.description or "") for key, field in _fields(last, before).items()]


def _fields(option: str, before: Sequence[str]) -> dict[str, FieldInfo]:
    """Return the fields of the config; of methods only where one is asked for, since that loads PyTorch."""
    chosen = next((word for flag, word in itertools.pairwise(before) if flag == "--method"), None)
    return dotted_options(methods=option.startswith("--method."), method=chosen)


def _literals(kind: Any) -> list[str]:
    """Return the words that a field takes, if they are a few."""
    if kind is bool:
        return ["true", "false"]
    if get_origin(kind) is Literal:
        return [str(word) for word in get_args(kind)]
    return [word for part in get_args(kind) for word in _literals(part)]


def _values(action: argparse.Action) -> Iterable[Word]:
    """Return what an argument may be: its choices, or the names that it takes."""
    if action.choices is not None:
        return [(str(choice), "") for choice in action.choices]
    return NAMES[action.dest]() if action.dest in NAMES and action.type is not Path else []


def _listed(what: str, means: str) -> Callable[[], list[Word]]:
    def read() -> list[Word]:
        from dualprompt import listing

        return [(row["name"], row[means]) for row in listing.LISTS[what]() if " " not in row["name"]]

    return read


def _studies() -> list[Word]:
    from dualprompt.studies import STUDIES

    return [(name, "") for name in STUDIES]


def _fixed(*words: str) -> Callable[[], list[Word]]:
    return lambda: [(word, "") for word in words]


NAMES: dict[str, Callable[[], list[Word]]] = {
    "preset": _listed("presets", "title"),
    "benchmark": _listed("presets", "title"),
    "end_to_end": _listed("presets", "title"),
    "method": _listed("methods", "summary"),
    "methods": _listed("methods", "summary"),
    "backbone": _listed("backbones", "title"),
    "datasets": _listed("benchmarks", "title"),
    "study": _studies,
    "device": _fixed("auto", "cpu", "cuda", "mps"),
    "precision": _fixed("auto", "fp32", "bf16"),
    "compile": _fixed("auto", "on", "off"),
    "track": _fixed("tensorboard", "wandb", "none"),
    "selection": _fixed("query", "batch_vote", "oracle"),
}
