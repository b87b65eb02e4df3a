"""Over all subcommands: each is found, explained with examples that parse, prints JSON, and is completed by shells."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from dualprompt import cli
from dualprompt.completion import SCRIPTS, following
from dualprompt.config import preset_names
from sandbox import COMMAND, World, call

PARSER, COMMANDS = cli.build_parser()
NAMES = sorted(COMMANDS.abouts)
# Their JSON is read in tests of their own: they take long, do not end, or need a hub.
ELSEWHERE = {"bench", "export", "serve", "push", "pull"}


def examples(text: str | None) -> list[list[str]]:
    """The command lines of a help text, as a shell would cut them, without pipes, comments and what is beside them."""
    lines = re.findall(r"(?:^  |\| )(?:[A-Z_]+=\S+ )?(dualprompt .*)$", text or "", re.MULTILINE)
    return [shlex.split(re.split(r" {2,}| \| | >>? ", line)[0])[1:] for line in lines]


def test_every_command_stands_once_in_the_list() -> None:
    listed = [name for group in cli.GROUPS.values() for name in group]
    assert sorted(listed) == NAMES
    for name in NAMES:
        assert f"\n    {name} " in PARSER.format_help()
    for line in PARSER.format_help().splitlines():
        assert len(line) <= 120


@pytest.mark.parametrize("name", NAMES)
def test_help_has_examples_that_parse_and_options_in_groups(name: str) -> None:
    parser = COMMANDS[name]
    told = parser.format_help()
    found = [words for words in examples(parser.epilog) if words[0] == name]
    assert found, "no example"
    for words in examples(parser.epilog):
        assert cli.parse(words).do
    assert not [line for line in told.splitlines() if len(line) > 120]
    for action in parser._actions:
        assert action.help or action.choices, action.dest
    for group in parser._action_groups:
        assert len(group._group_actions) <= 12, f"{group.title} of {name} has {len(group._group_actions)} options"
    assert "--json" in told
    assert "default: None" not in told


def test_the_examples_of_the_whole_command_parse() -> None:
    lines = examples(cli.EXAMPLES)
    assert len(lines) > 10
    for words in lines:
        assert cli.parse(words).command == words[0]


def test_without_arguments_there_is_help_and_a_wrong_command_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2  # nothing was done
    assert capsys.readouterr().out == PARSER.format_help()
    assert call("evalaute", "x").error == "unknown command 'evalaute'; did you mean 'evaluate'?"


def lives(world: World, folder: Path) -> list[list[object]]:
    """A life of runs and of a model in which every subcommand comes, each ready for the next."""
    run, model, root, images = folder / "run", folder / "model", folder / "runs", world.images
    picture = images / "test" / "ash" / "0.png"
    quick = ["--train.epochs", 1, "--runs", root]
    return [
        ["run", world.preset, "--method", "simple-cil", "--no-baseline", "--out", run],
        ["resume", run],
        ["show", run],
        ["evaluate", run],
        ["eval", run],
        ["compare", run, run],
        ["report", run],
        ["list", "runs", folder],
        ["list", "methods"],
        ["table", "main", "--benchmark", world.preset, "--methods", "lda", "--seeds", 1, "--against", "none", *quick,
         "--publish", folder / "table.json"],
        ["publish", folder / "table.json"],
        ["sweep", world.preset, "--methods", "frozen-head", "--grid", "train.lr=0.01,0.02", "--extend", 0, *quick],
        ["study", "prompting", world.preset, "--seeds", 1, *quick],
        ["data", "show", images],
        ["check", images / "train"],
        ["learn", model, images / "train", "--backbone", world.weights, "--method", "lda"],
        ["more", model, images / "test"],
        ["predict", model, picture],
        ["watch", model, images / "test" / "ash", "--once", "--to", folder / "answers.csv"],
        ["info", model],
        ["calibrate", model],
        ["evaluate", model, images / "test"],
        ["rename", model, "ash", "oak"],
        ["merge", model, "oak", "elm", "--into", "tree"],
        ["forget", model, "fir"],
        ["versions", model],
        ["rollback", model],
        ["completion", "bash"],
    ]  # fmt: skip


def test_every_command_prints_one_json_value(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tried = set()
    for words in lives(world, tmp_path):
        done = call(*words, "--json")
        assert done.code == 0, f"{words}: {done.err}"
        assert json.loads(done.out) is not None, words
        tried.add(words[0])
    assert tried | ELSEWHERE == {*NAMES, "eval"}


def test_evaluate_takes_a_run_or_a_model_and_says_which_it_wants(world: World, tmp_path: Path) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    assert call("run", world.preset, "--method", "simple-cil", "--no-baseline", "--out", run).code == 0
    taught = call("learn", model, world.images / "train", "--backbone", world.weights, "--method", "lda")
    assert taught.code == 0, taught.err
    assert f"learned task 1 ('{world.images.name}')" in taught.out  # `train` says nothing of what lies in it
    assert "is a model: say on which images" in call("evaluate", model).error
    assert "is a run, evaluated on its own test images" in call("evaluate", run, world.images / "test").error
    assert "--record is for a model" in call("evaluate", run, "--record").error
    assert "--selection is for a run" in call("evaluate", model, world.images / "test", "--selection", "query").error
    assert "does not exist" in call("evaluate", tmp_path / "none").error
    again, alias = (call(verb, run, "--json").json for verb in ("evaluate", "eval"))
    assert again == alias


def completed(*words: str) -> list[str]:
    return [word for word, _ in following(words, COMMANDS)]


def test_words_that_may_follow() -> None:
    assert completed("") == NAMES
    assert completed("ev") == ["evaluate"]
    assert completed("run", "m") == ["mini", "mini-domains"]
    assert completed("run", "mini", "") == []
    assert completed("list", "") == ["backbones", "benchmarks", "methods", "presets", "protocols", "runs"]
    assert "dualprompt-lda" in completed("run", "mini", "--method", "dual")
    assert completed("run", "mini", "--se") == ["--seed", "--seeds"]
    assert completed("run", "mini", "--tr") == ["--track", "--train."]
    assert completed("run", "mini", "--train.sc") == ["--train.schedule"]
    assert completed("run", "mini", "--train.schedule", "") == ["constant", "cosine", "steps"]
    assert completed("run", "mini", "--benchmark.skip_bad", "") == ["false", "true"]
    assert completed("run", "mini", "--method", "simple-cil", "--method.e") == []
    assert "--method.e_layers" in completed("run", "mini", "--method.e")
    assert completed("run", "--seeds", "3", "spl") == sorted(name for name in preset_names() if name.startswith("spl"))
    assert completed("resume", "run", "--tr") == ["--track"]
    assert completed("learn", "") == []  # a folder: the shell's own business
    assert "--words" not in completed("completion", "bash", "--")


def test_every_option_can_be_completed() -> None:
    for name in NAMES:
        flags = [
            f for action in COMMANDS[name]._actions if action.help != argparse.SUPPRESS for f in action.option_strings
        ]
        found = completed(name, "-")
        assert set(flags) <= set(found), name


def test_bash_completes(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dualprompt").symlink_to(COMMAND)
    script = (
        SCRIPTS["bash"]
        + """
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _dualprompt; printf '%s|' "${COMPREPLY[@]}"; echo; }
ask dualprompt ver
ask dualprompt list p
ask "$1" run mini --no
ask dualprompt learn ""
complete -p dualprompt
"""
    )
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    words = ["bash", "-c", script, "bash", str(tmp_path / "bin" / "dualprompt")]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | {"PATH": path})
    *found, registered = done.stdout.splitlines()
    assert found == ["versions|", "presets|protocols|", "--no-baseline|--nodes|", "|"]
    assert registered == "complete -o default -F _dualprompt dualprompt"
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_the_script(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    check = [shell, "-n"] if shell == "zsh" else [shell, "--no-execute"]
    done = subprocess.run(check, input=SCRIPTS[shell], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
