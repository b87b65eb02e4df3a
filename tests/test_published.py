"""The configs that the docs publish are the ones that the documented commands resolve to today."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dualprompt.config import RunConfig, compose, load_preset
from dualprompt.methods.base import METHODS
from dualprompt.run.identity import config_digest
from dualprompt.sweeps import main_table
from dualprompt.training import group
from dualprompt.values import flat

DOCS = Path(__file__).parent.parent / "docs"
TABLES = {path.stem.removeprefix("main-"): path for path in sorted((DOCS / "results").glob("main-*.json"))}
SWEEPS = [
    path for path in sorted((DOCS / "experiments").glob("*.json")) if json.loads(path.read_text())["kind"] == "sweep"
]
EMBEDDED = {"backbone.name": "embedded"}


def digest_of(config: RunConfig) -> str:
    return config_digest(group.plan([config], baseline=False)[0].config)


@pytest.mark.parametrize("preset", TABLES)
def test_the_published_tables_are_what_the_commands_run(preset: str) -> None:
    rows = json.loads(TABLES[preset].read_text())["rows"]
    labels = list(dict.fromkeys(row["label"] for row in rows))
    buffers = sorted({row["buffer"] for row in rows if row["buffer"]})
    lines = main_table.lines(preset, None, labels, buffers, EMBEDDED)
    found = {(line.label, line.buffer): line.config for line in lines}
    for row in rows:
        assert row["runs"]
        told = RunConfig.model_validate(row["config"])  # options that came later are at their defaults
        asked = found[row["label"], row["buffer"]].model_copy(update={"seed": told.seed})
        assert digest_of(told) == digest_of(asked), row["label"]


def best_of(path: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the preset, the method and the values of the best try of every method of a published sweep."""
    best = [row for row in json.loads(path.read_text())["rows"] if row["best"]]
    assert len({row["label"] for row in best}) == len(best) > 0
    return [(row["config"]["benchmark"]["name"], row["label"], row["values"]) for row in best]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_presets_hold_the_winners_of_the_published_sweeps(path: Path) -> None:
    for preset, method, values in best_of(path):
        if method in ("frozen-head", "dualprompt"):  # they keep the paper's recipe
            continue
        chosen = flat(compose(preset, None, {**EMBEDDED, "method.name": method}).model_dump(mode="json"))
        defaults = METHODS[method].Config.model_validate({"name": method}).model_dump(mode="json")
        for key, value in values.items():
            assert chosen.get(key, defaults.get(key.removeprefix("method."))) == value, key


def test_presets_name_only_methods_that_exist() -> None:
    for preset in ("mini", "split-cifar100", "5-datasets", "split-imagenet-r"):
        assert set(load_preset(preset).get("methods", {})) <= set(METHODS.names()), yaml.safe_dump(preset)


def test_a_run_is_the_same_however_many_images_are_judged_at_a_time() -> None:
    digests = {config_digest(compose("mini", None, {"evaluate.batch_size": size})) for size in (1, 128)}
    assert len(digests) == 1
    voted = {"method.selection": "batch_vote"}  # there it decides what is selected
    digests = {config_digest(compose("mini", None, voted | {"evaluate.batch_size": size})) for size in (1, 128)}
    assert len(digests) == 2
