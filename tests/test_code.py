"""The code that decides a run is part of what it is: after an edit no old result passes for a new one."""

from __future__ import annotations

import ast
import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dualprompt
from dualprompt.errors import DualPromptError
from dualprompt.files import digest
from dualprompt.methods.base import METHODS
from dualprompt.run import code
from dualprompt.run.folder import Run
from dualprompt.sweeps import store
from dualprompt.sweeps.store import Fresh, obtain
from dualprompt.training import group
from sandbox import World, call, contents
from test_store import Notes, configs


class Source:
    """A copy of the package's source, from which fingerprints are taken, and which can be edited."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        here = Path(dualprompt.__file__).parent
        shutil.copytree(here, folder, ignore=lambda _, names: [n for n in names if "." in n and n[-3:] != ".py"])

    def edit(self, file: str, change: str = "UNSEEN = 1\n") -> None:
        """Append to a file; what was worked out before is forgotten, as in a new process."""
        path = self.folder / file
        path.write_text(path.read_text() + change)
        forget()


def forget() -> None:
    code.of_method.cache_clear()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    copy = Source(tmp_path / "dualprompt")
    monkeypatch.setattr(code, "PACKAGE", copy.folder)
    forget()
    yield copy
    forget()


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("methods/er.py", {"er"}),
        ("methods/finetune.py", {"er", "ewc"}),
        ("prompts/bank.py", {"dualprompt"}),
        ("methods/heads.py", {"er", "ewc", "dualprompt", "frozen-head"}),
        *(
            (f"{name}.py", {"er", "ewc", "dualprompt", "frozen-head"})
            for name in ("training/loop", "training/optimise", "run/checkpoint", "derived", "metrics", "seeds")
        ),
        ("backbones/vit.py", {"er", "ewc", "dualprompt", "frozen-head"}),
        ("data/augment.py", {"er", "ewc", "dualprompt", "frozen-head"}),
        *((f"{name}.py", set[str]()) for name in ("run/tracking", "progress", "console")),
        *((f"{name}.py", set[str]()) for name in ("training/group", "run/folder", "run/identity", "run/records")),
        ("sweeps/store.py", set()),
        ("methods/co2l.py", set()),
    ],
)
def test_an_edit_changes_the_runs_that_it_may_decide(source: Source, file: str, changed: set[str]) -> None:
    methods = ("er", "ewc", "dualprompt", "frozen-head")
    before = {name: code.fingerprint(name) for name in methods}
    source.edit(file, "\n\n# A comment.\n")
    assert {name: code.fingerprint(name) for name in methods} == before
    source.edit(file)
    assert {name for name in methods if code.fingerprint(name) != before[name]} == changed


SNIPPET = '''
"""What it is."""
from __future__ import annotations
@decorated(1, key="a")
class Thing(Base):
    """A docstring."""
    a: int = 3; b = (1.5, -2e-05, None, b"x", ...)
    async def f(self, x, /, *, y=1) -> str:
        return f"{x!r:>{y}} and {'q'}" if (n := x) else [i for i in x if i]
def g(*a, **k):
    """Another."""
    match a:
        case [1, *rest]: return lambda: rest
    try: pass
    except (A, B): raise
'''


def test_layout_and_words_do_not_count_and_every_python_agrees() -> None:
    other = SNIPPET.replace("3; b", "3  # three\n    b").replace('"""Another."""', "").replace("'q'", '"q"')
    other = other.replace('key="a")', "key='a',\n)").replace("What it is", "What it was")
    if sys.version_info < (3, 12):
        other = other.replace('{"q"}', "{'q'}")
    assert other != SNIPPET
    told = [digest(code.plain(ast.parse(text))) for text in (SNIPPET, other, SNIPPET.replace("1.5", "1.25"))]
    # As Python 3.11 has it; another hash means that runs of one version are strangers in the next.
    assert told[0] == told[1] == "b45232cf65e62335f4e0a02f42649d18da5b2679bf88ab275d7edafcac119687"
    assert told[2] != told[0]


OUTSIDE = """
from dualprompt.methods.base import METHODS
from dualprompt.methods.frozen_head import FrozenHead
from near_by import factor

@METHODS.register("outside")
class Outside(FrozenHead):
    summary = "from elsewhere"
    def features(self, batch):
        return factor() * super().features(batch)
"""


def test_a_method_from_elsewhere_counts_with_what_lies_beside_it(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    METHODS.names()
    (tmp_path / "outside_method.py").write_text(OUTSIDE)
    (tmp_path / "near_by.py").write_text("def factor(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(METHODS, "_things", dict(METHODS._things))
    importlib.import_module("outside_method")
    try:
        told = [code.fingerprint("outside")]
        for edited in ("outside_method.py", "near_by.py", "dualprompt/methods/frozen_head.py"):
            path = tmp_path / edited
            path.write_text(path.read_text() + "\nUNSEEN = 1\n")
            forget()
            told.append(code.fingerprint("outside"))
        assert len(set(told)) == 4
    finally:
        for name in ("outside_method", "near_by"):
            sys.modules.pop(name)


def test_a_result_of_other_code_is_left_alone(world: World, source: Source, tmp_path: Path) -> None:
    root, asked = tmp_path / "runs", configs(world, "frozen-head", train__epochs=1)
    first = obtain(asked, root)[0].run
    assert first.manifest()["identity"]["code"] == code.fingerprint("frozen-head")
    before = contents(root)
    source.edit("methods/frozen_head.py", "# A comment.\n")
    assert obtain(asked, root)[0].run.folder == first.folder
    source.edit("methods/frozen_head.py")
    notes = Notes()
    second = obtain(asked, root, notes)[0].run
    assert second.folder != first.folder
    assert second.finished
    assert notes.lines[0] == f"1 results of other code are in {root}; they stay there, and are not reused"
    assert {path: content for path, content in contents(root).items() if path in before} == before
    # All else is the same run: the config's hash means what it meant.
    ours, theirs = (run.manifest()["identity"] for run in (second, first))
    assert {key for key in ours if ours[key] != theirs[key]} == {"code"}


def test_a_table_of_what_is_stored_shows_other_code_when_asked(world: World, source: Source, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    options = ("--benchmark", world.preset, "--methods", "frozen-head,simple-cil", "--seeds", 1, "--train.epochs", 1)
    command = ("table", "main", *options, "--runs", root, "--json")
    old = {row["method"]: row for row in call(*command).json["rows"]}
    source.edit("methods/simple_cil.py")
    stored = call(*command, "--stored")
    assert [row["method"] for row in stored.json["rows"]] == ["frozen-head"]
    assert stored.err == f"1 results of other code are in {root}; --any-code shows them too\n"
    both = {row["method"]: row for row in call(*command, "--stored", "--any-code").json["rows"]}
    assert {name: row["average_accuracy"] for name, row in both.items()} == {
        name: row["average_accuracy"] for name, row in old.items()
    }
    assert both["simple-cil"]["of_other_code"] == old["simple-cil"]["runs"]
    assert both["frozen-head"]["of_other_code"] == []
    words = call(*command[:-1], "--stored", "--any-code").out
    assert "made by other code than this version's: simple-cil (1 of 1)" in words
    # A run from before code was noted is of other code, too.
    folder = Path(old["frozen-head"]["runs"][0])
    values = json.loads((folder / "manifest.json").read_text())
    del values["identity"]["code"]
    (folder / "manifest.json").write_text(json.dumps(values))
    folder = folder.rename(root / f"frozen-head-{digest(values['identity'])[:12]}")
    assert "none of the 2 runs is finished" in call(*command[:-1], "--stored").err
    assert call("show", folder).code == call("eval", folder).code == 0
    assert "--any-code goes with --stored" in call(*command[:-1], "--any-code").error
    assert "leave one of them out" in call(*command[:-1], "--stored", "--fresh").error


def test_fresh_runs_everything_once_more_and_keeps_what_was(world: World, tmp_path: Path) -> None:
    root, asked = tmp_path / "runs", configs(world, "frozen-head", train__epochs=1)
    first = obtain(asked, root)[0].run
    (first.folder / "mine.txt").write_text("a note")
    before, notes, fresh = contents(first.folder), Notes(), Fresh()
    again = obtain(asked * 2, root, notes, fresh=fresh)[0].run
    assert again.folder == first.folder
    assert not (again.folder / "mine.txt").exists()
    assert contents(root / "aside" / f"{first.folder.name}.1") == before
    assert notes.lines[0] == f"1 runs that were there are now in {root / 'aside'}; new ones take their place"
    made = contents(root)
    assert obtain(asked, root, fresh=fresh)[0].run.finished
    assert contents(root) == made, "one command renews a run once"
    obtain(asked, root, fresh=Fresh())
    assert {path.name for path in (root / "aside").iterdir()} == {f"{first.folder.name}.{n}" for n in (1, 2)}
    with store.held(first.folder, "mine"), pytest.raises(DualPromptError, match="another process is carrying it out"):
        obtain(asked, root, fresh=Fresh())
    assert (first.folder / "result.json").is_file()


def begun(world: World, folder: Path) -> Run:
    """A run that was stopped after its first task."""
    config = group.plan(configs(world, "frozen-head", train__epochs=1), baseline=False)[0].config
    [run] = group.start([group.Member(".", config)], folder)
    for path in (run.result_path, *run.checkpoints.folder.glob("task-000[23]*")):
        path.unlink()
    return run


def test_a_run_is_not_continued_by_other_code_unless_it_is_asked_for(
    world: World, source: Source, tmp_path: Path
) -> None:
    run = begun(world, tmp_path / "run")
    source.edit("methods/frozen_head.py")
    before = contents(run.folder)
    refused = call("resume", run.folder)
    assert refused.error.startswith(f"run {run.folder} was made by other code (dualprompt {dualprompt.__version__}")
    assert "--anyway" in refused.error
    assert contents(run.folder) == before
    assert call("resume", run.folder, "--anyway").code == 0
    assert run.result()["code_changed"] is True
    [record] = run.manifest()["continued_by_other_code"]
    assert record["code"] == code.fingerprint("frozen-head") != run.manifest()["identity"]["code"]
    assert call("show", run.folder).code == 0


def test_a_run_that_two_codes_made_is_nobodys_answer(world: World, source: Source, tmp_path: Path) -> None:
    root, asked = tmp_path / "runs", configs(world, "frozen-head", train__epochs=1)
    run = obtain(asked, root)[0].run
    kept = run.result_path.read_bytes()
    run.result_path.unlink()
    source.edit("methods/frozen_head.py")
    group.resume(run.folder, anyway=True)
    here = Path(dualprompt.__file__).parent
    shutil.copy(here / "methods/frozen_head.py", source.folder / "methods/frozen_head.py")
    forget()
    assert store.finished(asked, root) == [None]
    again = obtain(asked, root)[0].run
    assert (again.folder, again.code_changed) == (run.folder, False)
    assert (root / "aside" / f"{run.folder.name}.1" / "result.json").is_file()
    assert json.loads(kept)["accuracy_matrix"] == again.result()["accuracy_matrix"]


def test_an_unchanged_run_says_nothing_of_it(world: World, tmp_path: Path) -> None:
    run = begun(world, tmp_path / "run")
    manifest: Any = run.manifest_path.read_bytes()
    assert call("resume", run.folder, "--anyway").code == 0
    assert run.manifest_path.read_bytes() == manifest
    assert "code_changed" not in json.loads(run.result_path.read_text())
