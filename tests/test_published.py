"""The configs that docs/results/ publishes are the ones that the documented commands resolve to today."""

import json
from pathlib import Path

import pytest

from dualprompt.config import RunConfig, compose
from dualprompt.training import group
from dualprompt.training.run import config_digest

PUBLISHED = Path(__file__).parent.parent / "docs" / "results" / "core-2026-11-15.json"


@pytest.mark.parametrize("entry", json.loads(PUBLISHED.read_text()), ids=lambda entry: entry["name"])
def test_the_published_config_is_what_the_command_runs(entry):
    preset, recipe, _ = entry["name"].rsplit("-", 2)
    config = compose(preset, recipe, {"backbone.name": "embedded", "seed": entry["seed"]})
    resolved = group.plan([config], baseline=False)[0].config
    assert config_digest(resolved) == entry["identity"]["config"]
    assert config_digest(RunConfig.model_validate(entry["config"])) == entry["identity"]["config"]
