"""Names to things, found by importing every module of a package, so that adding one is adding a file.

Other distributions add theirs through entry points.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar, cast

from dualprompt.errors import DualPromptError, nearest, one_line

T = TypeVar("T")
S = TypeVar("S")


log = logging.getLogger("dualprompt")


class Registry(Generic[T]):
    """A named collection filled by the modules of `package` when it is first asked.

    Installed distributions add to it by entry points of the group `group`: each has the name of a thing, and names the
    module, or something in the module, that registers it. It must have the attributes that `needs` lists.
    """

    def __init__(self, kind: str, package: str, group: str | None = None, needs: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self.package = package
        self.group = group
        self.needs = needs
        self._things: dict[str, T] = {}
        self._broken: dict[str, str] = {}  # what other distributions promised and do not have, and why
        self._discovered = False

    def register(self, name: str) -> Callable[[S], S]:
        """Return a decorator that files the decorated thing under `name`."""

        def file(thing: S) -> S:
            if name in self._things:
                raise ValueError(f"{self.kind} '{name}' is registered twice")
            self._things[name] = cast(T, thing)  # a checker keeps the exact type of what is decorated
            return thing

        return file

    @contextmanager
    def with_more(self, things: Mapping[str, T]) -> Iterator[None]:
        """Know these things too, for a while; none may have the name of another."""
        self._discover()
        if taken := [name for name in things if name in self._things]:
            raise DualPromptError(f"there is a {self.kind} '{taken[0]}' already; give yours another name")
        self._things |= things
        try:
            yield
        finally:
            for name in things:
                del self._things[name]

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
            if name in self._broken:
                raise DualPromptError(self._broken[name]) from None
            raise DualPromptError(f"unknown {self.kind} '{name}'; {nearest(name, self._things)}") from None

    def _discover(self) -> None:
        if self._discovered:
            return
        self._discovered = True
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        for point in entry_points(group=self.group) if self.group else ():
            self._plug_in(point)

    def _plug_in(self, point: EntryPoint) -> None:
        """Let another distribution register what it promised; one that cannot is noted, and changes nothing."""
        before = dict(self._things)
        try:
            point.load()
            if point.name not in self._things:
                raise LookupError(f"it registers no {self.kind} of that name")
            if lacking := [name for name in self.needs if not hasattr(self._things[point.name], name)]:
                raise TypeError(f"it has no '{lacking[0]}'")
        except (Exception, SystemExit) as error:  # noqa: BLE001  a stranger's module may raise anything
            self._things = before
            said = one_line(f"{type(error).__name__}: {error}")
            owner = point.dist.name if point.dist else "another distribution"
            self._broken[point.name] = (
                f"{self.kind} '{point.name}' of {owner} cannot be used ({said}); mend or uninstall {owner}"
            )
            log.warning("%s", self._broken[point.name])
