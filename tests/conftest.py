"""Fixtures that several test files share."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

# Before NumPy is imported, here and in processes that tests start: several test processes of several threads each
# spend most of their time waiting for each other.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import torch

import quick
from dualprompt.learner import ContinualLearner
from learning import TASKS, empty
from sandbox import World, make_world, pictures

# Sums depend on how threads cut them, and many tests compare bits with a process of one thread; for models this small,
# threads of several test processes would only wait for each other.
torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)  # so it comes before pytest-xdist's, which comes first of others and reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Keep tests that share a fixture of their file in one process, and skip what needs a GPU where there is none."""
    for item in items:
        if _shares_a_fixture(item) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    for item in items:
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and PyTorch sees none"))
    return (yield)


def _shares_a_fixture(item: pytest.Item) -> bool:
    """Return whether a test uses what is made once for its file; each process that has such a test makes it anew."""
    info = getattr(item, "_fixtureinfo", None)
    return info is not None and any(each[-1].scope == "module" for each in info.name2fixturedefs.values())


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's cache out of the tests, in this process and those it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUALPROMPT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def _quick() -> Iterator[str]:
    with quick.python() as path:
        yield path


@pytest.fixture
def quick_python(_quick: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have our code start processes of its own at once, without seconds of imports; see `quick`."""
    monkeypatch.setattr(sys, "executable", _quick)
    return _quick


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A tiny backbone, images and preset; tests that change them make their own with `make_world`."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests that are coroutines run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def saved(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to serve, not to be changed: it knows ash and birch in one task, and cedar in another."""
    options = {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3}
    learner = ContinualLearner(str(world.weights), "dualprompt", options=options, device="cpu")
    learner.learn({name: pictures(world, name) for name in ("ash", "birch")}, "first", epochs=1)
    learner.learn({"cedar": pictures(world, "cedar")}, "second", epochs=1)
    return learner.save(tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, for one test."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture(scope="session")
def folders(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The world's trees, a folder of class folders for each task."""
    root = tmp_path_factory.mktemp("seasons")
    for name, classes in TASKS.items():
        for label in classes:
            shutil.copytree(world.images / "train" / label, root / name / label)
    return {name: root / name for name in TASKS}


@pytest.fixture(scope="session")
def kept(world: World, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows all three tasks."""
    learner = empty(world)
    for name in TASKS:
        learner.learn(folders[name])
    return learner.save(tmp_path_factory.mktemp("kept") / "model")
