"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sandbox import World, make_world

# Sums depend on how threads cut them, and many tests compare bits with a process of one thread; for models this small,
# threads of several test processes would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's cache out of the tests, in this process and those it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUALPROMPT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A tiny backbone, images and preset; tests that change them make their own with `make_world`."""
    return make_world(tmp_path_factory.mktemp("world"))
