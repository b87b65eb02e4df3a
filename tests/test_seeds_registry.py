"""Seeds derived from places, and names that find things by themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dualprompt.errors import DualPromptError, nearest
from dualprompt.registry import Registry
from dualprompt.seeds import derive

places = st.lists(st.integers(-5, 10**6) | st.text("ab:/1int", max_size=5), max_size=4)


def test_seeds_are_fixed_for_ever() -> None:
    """Results of earlier versions can be repeated only while these stay."""
    assert derive(0) == 3456079177858693020
    assert derive(0, "order", 1, 2) == 9140743717297242091
    assert derive(3, "begin", 0) == 3168723898410898190


@given(st.integers(0, 2**31), places)
def test_seeds_are_non_negative_63_bits_and_repeatable(seed: int, place: list[int | str]) -> None:
    value = derive(seed, *place)
    assert 0 <= value < 2**63
    assert value == derive(seed, *place)


@given(st.integers(0, 3), places, st.integers(0, 3), places)
def test_different_places_have_different_seeds(
    seed: int, place: list[int | str], other_seed: int, other: list[int | str]
) -> None:
    assume((seed, place) != (other_seed, other))
    assert derive(seed, *place) != derive(other_seed, *other)


def test_numbers_and_their_names_differ() -> None:
    assert derive(0, 1) != derive(0, "1")
    assert derive(0, "a", "b") != derive(0, "a/str:b")
    assert derive(0, 1, 1) != derive(0, 11)
    assert derive(11, 1) != derive(1, 1, 1)


def test_seeds_look_random() -> None:
    values = np.array([derive(0, "order", task, epoch) for task in range(100) for epoch in range(100)], dtype=np.uint64)
    assert len(set(values.tolist())) == len(values)
    bits = (values[:, None] >> np.arange(63, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.025  # five standard deviations
    draws = [np.random.default_rng(int(value)).random() for value in values[:2000]]
    assert abs(np.mean(draws) - 0.5) < 0.04
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.1


def test_seeds_do_not_change_with_the_process() -> None:
    code = "from dualprompt.seeds import derive; print(derive(7, 'order', 3, 'x'))"
    outputs = {subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(2)}
    assert outputs == {f"{derive(7, 'order', 3, 'x')}\n"}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A package of two modules that file three things when imported."""
    name = "zoo_of_" + request.node.name
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from dualprompt.registry import Registry\nANIMALS: Registry[type] = Registry('animal', __name__)\n"
    )
    (folder / "cats.py").write_text(
        f"from {name} import ANIMALS\n@ANIMALS.register('tiger')\nclass Tiger: ...\n"
        "@ANIMALS.register('house-cat')\nclass HouseCat: ...\n"
    )
    (folder / "birds.py").write_text(f"from {name} import ANIMALS\n@ANIMALS.register('wren')\nclass Wren: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def animals(package: str) -> Registry[type]:
    import importlib

    return importlib.import_module(package).ANIMALS


def test_discovery_finds_every_module(package: str) -> None:
    registry = animals(package)
    assert f"{package}.cats" not in sys.modules, "nothing is imported before it is asked for"
    assert registry.names() == ["house-cat", "tiger", "wren"]
    assert registry["tiger"].__name__ == "Tiger"
    assert "wren" in registry
    assert "lion" not in registry


def test_an_unknown_name_is_answered_with_the_nearest(package: str) -> None:
    with pytest.raises(DualPromptError) as error:
        animals(package)["tigre"]
    assert str(error.value) == "unknown animal 'tigre'; did you mean 'tiger'? known: house-cat, tiger, wren"
    with pytest.raises(DualPromptError, match="unknown animal 'xyz'; known: house-cat, tiger, wren"):
        animals(package)["xyz"]


def test_a_name_taken_twice_is_refused(package: str) -> None:
    registry = animals(package)
    registry.names()
    with pytest.raises(ValueError, match="animal 'wren' is registered twice"):
        registry.register("wren")(int)
    assert registry["wren"].__name__ == "Wren"


def test_decorating_changes_nothing() -> None:
    registry: Registry[type] = Registry("thing", "dualprompt.data")

    class Thing: ...

    assert registry.register("thing")(Thing) is Thing


def test_nearest_without_a_close_name() -> None:
    assert nearest("q", ["b", "a"]) == "known: a, b"
    assert nearest("dualpromt", ["dualprompt", "frozen-head"]).startswith("did you mean 'dualprompt'? ")
