"""The examples of the guides on data, pasted from the page into a file and run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dualprompt.config import BenchmarkConfig
from dualprompt.data.cache import Store
from dualprompt.data.stream import build_stream
from dualprompt.run.folder import Run
from plugins import pasted
from sandbox import World, call


def imported(name: str, containing: str, folder: Path) -> ModuleType:
    """Write an example into a file, and import it from there."""
    if name in sys.modules:  # it is registered once
        return sys.modules[name]
    path = folder / f"{name}.py"
    path.write_text(pasted(containing))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pasted")


def test_a_dataset_is_one_file(world: World, folder: Path, tmp_path: Path) -> None:
    imported("stripes", 'DATASETS.register("stripes")', folder)
    shown = call("data", "show", "stripes", "--out", tmp_path / "stripes.png", "--json")
    assert shown.code == 0, shown.err
    assert [each["train"] for each in shown.json["classes"]] == [40, 40]
    dataset = f"[stripes, {world.images}]"
    words = ("--benchmark.dataset", dataset, "--benchmark.tasks", "null", "--benchmark.train_per_class", 4)
    done = call("run", world.preset, "--method", "simple-cil", "--no-baseline", "--out", tmp_path / "run", *words)
    assert done.code == 0, done.err
    assert Run.open(tmp_path / "run").result()["tasks"] == ["stripes", "trees"]


def test_arrays_are_a_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(pasted("dataset_of("), names)
    assert names["run"].tasks == (("0", "1"), ("2", "3"))
    assert str(names["run"].accuracy_matrix) in capsys.readouterr().out


def test_a_stream_is_one_file(world: World, folder: Path, tmp_path: Path) -> None:
    imported("instalments", 'STREAMS.register("instalments")', folder)
    words = ("--benchmark.stream", "instalments", "--benchmark.tasks", 2)
    done = call("run", world.preset, "--method", "simple-cil", "--no-baseline", "--out", tmp_path / "run", *words)
    assert done.code == 0, done.err
    result = Run.open(tmp_path / "run").result()
    assert result["tasks"] == ["part 1", "part 2"]
    whole = call("run", world.preset, "--method", "simple-cil", "--no-baseline", "--out", tmp_path / "whole",
                 "--benchmark.tasks", 1)  # fmt: skip
    assert whole.code == 0, whole.err
    # Means do not care in which portions they come, so the last word is that of one task with everything.
    assert result["accuracy_matrix"][-1] == Run.open(tmp_path / "whole").result()["accuracy_matrix"][-1] * 2
    refused = call("run", world.preset, "--method", "lwf", "--no-baseline", "--out", tmp_path / "no", *words)
    assert refused.code != 0
    assert "'lwf' cannot learn a stream" in refused.err
    assert not (tmp_path / "no").exists()


def test_its_instalments_are_all_images_once(world: World, folder: Path) -> None:
    imported("instalments", 'STREAMS.register("instalments")', folder)
    config = BenchmarkConfig(dataset=str(world.images), stream="instalments", tasks=3)
    found = build_stream(config, 0, Store(64, True))
    rows = np.concatenate([each.train.indices for each in found.experiences])
    assert sorted(rows) == list(range(39))
    for each in found.experiences:
        assert not each.border
        assert set(each.train.labels.tolist()) == set(each.labels) == set(range(6))
