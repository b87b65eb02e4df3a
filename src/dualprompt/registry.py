"""Names to things, found by importing every module of a package, so that adding one is adding a file."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from dualprompt.errors import DualPromptError, nearest

T = TypeVar("T")
S = TypeVar("S")


class Registry(Generic[T]):
    """A named collection filled by the modules of `package` when it is first asked."""

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._things: dict[str, T] = {}
        self._discovered = False

    def register(self, name: str) -> Callable[[S], S]:
        """Return a decorator that files the decorated thing under `name`."""

        def file(thing: S) -> S:
            if name in self._things:
                raise ValueError(f"{self.kind} '{name}' is registered twice")
            self._things[name] = cast(T, thing)  # a checker keeps the exact type of what is decorated
            return thing

        return file

    def names(self) -> list[str]:
        """Return every known name, sorted."""
        self._discover()
        return sorted(self._things)

    def __contains__(self, name: str) -> bool:
        self._discover()
        return name in self._things

    def __getitem__(self, name: str) -> T:
        self._discover()
        try:
            return self._things[name]
        except KeyError:
            raise DualPromptError(f"unknown {self.kind} '{name}'; {nearest(name, self._things)}") from None

    def _discover(self) -> None:
        if self._discovered:
            return
        self._discovered = True
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
