"""Methods of other distributions: found by entry points, part of a run's identity, and harmless when broken."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS
from dualprompt.run import code
from plugins import installed, write_distribution
from sandbox import World, call

GROUP = "dualprompt.methods"
METHOD = """
from dualprompt.methods.base import METHODS
from dualprompt.methods.frozen_head import FrozenHead, FrozenHeadConfig
from far_helper import factor

class FarConfig(FrozenHeadConfig):
    name: str = "far"

@METHODS.register("far")
class Far(FrozenHead[FarConfig]):
    summary = "from far away"
    def features(self, batch):
        return factor() * super().features(batch)
"""
HELPER = "def factor(): return 2.0\n"


def test_a_method_of_another_distribution_is_found_listed_and_run(world: World, tmp_path: Path) -> None:
    site = tmp_path / "site"
    write_distribution(site, "far-away", {"far_method": METHOD, "far_helper": HELPER}, GROUP, "far = far_method:Far")
    with installed(site, METHODS):
        assert METHODS["far"].Config.model_fields["name"].default == "far"
        rows = call("list", "methods", "--json").json
        assert [row["summary"] for row in rows if row["name"] == "far"] == ["from far away"]
        out = tmp_path / "run"
        done = call("run", world.preset, "--method", "far", "--no-baseline", "--train.epochs", 1, "--out", out)
        assert done.code == 0, done.err
        assert call("eval", out).code == 0
    with pytest.raises(DualPromptError, match="unknown method 'far'"):
        METHODS["far"]
    assert "unknown method 'far'" in call("eval", out).error


def test_the_code_of_another_distribution_is_part_of_a_run(world: World, tmp_path: Path) -> None:
    site, out = tmp_path / "site", tmp_path / "run"
    write_distribution(site, "far-away", {"far_method": METHOD, "far_helper": HELPER}, GROUP, "far = far_method")
    told = []
    for edited in (None, "far_method", "far_helper"):
        if edited:
            path = site / f"{edited}.py"
            path.write_text(path.read_text() + "\nUNSEEN = 1\n")
        with installed(site, METHODS):
            told.append(code.fingerprint("far"))
            if edited is None:
                options = ("--method", "far", "--no-baseline", "--train.epochs", 1, "--out", out)
                assert call("run", world.preset, *options).code == 0
                (out / "result.json").unlink()
                (out / "checkpoints" / "task-0003.safetensors").unlink()
            else:
                assert "code" in call("resume", out).error
    assert len(set(told)) == 3


BARE = METHOD.replace("(FrozenHead[FarConfig])", "").replace('"far"', '"lacks"')
BROKEN = {
    "absent": ("", "absent = no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "raises": ("raise RuntimeError('two\\nlines')", "raises = broken", "RuntimeError: two"),
    "leaves": ("import sys; sys.exit(3)", "leaves = broken", "SystemExit: 3"),
    "silent": ("", "silent = broken", "LookupError: it registers no method of that name"),
    "lacks": (BARE, "lacks = broken", "TypeError: it has no 'Config'"),
    "frozen-head": (METHOD.replace('"far"', '"frozen-head"'), "frozen-head = broken", "is registered twice"),
    "half": (METHOD + "\n1 / 0\n", "far = broken\nhalf = broken", "ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plug_in_costs_one_line_and_hinders_nobody(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, point, reason = BROKEN[name]
    site = tmp_path / "site"
    before = {each: METHODS[each] for each in METHODS.names()}
    write_distribution(site, "bad-luck", {"broken": source, "far_helper": HELPER}, GROUP, point)
    good = METHOD.replace('"far"', '"good"')
    write_distribution(site, "good-luck", {"good_method": good}, GROUP, "good = good_method")
    with installed(site, METHODS), caplog.at_level(logging.WARNING, "dualprompt"):
        assert {each: METHODS[each] for each in METHODS.names() if each != "good"} == before
        assert METHODS["good"].summary == "from far away"
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == point.count("\n") + 1
        for line in lines:
            assert reason in line
            assert "of bad-luck cannot be used" in line
            assert line.endswith("; mend or uninstall bad-luck")
            assert "\n" not in line
        if name not in before:
            with pytest.raises(DualPromptError) as error:
                METHODS[name]
            assert str(error.value) == lines[-1]
