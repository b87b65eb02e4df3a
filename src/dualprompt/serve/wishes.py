"""What clients may want, in JSON, as types."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, max_length=1000)]


class Wanted(BaseModel):
    """What a client wants; anything beyond its fields is refused."""

    model_config = ConfigDict(extra="forbid")


class Rename(Wanted):
    """A class and its new name."""

    old: Name
    new: Name


class Merge(Wanted):
    """Classes that are to be one."""

    classes: Annotated[list[Name], Field(min_length=1, max_length=1000)]
    into: Name


class Threshold(Wanted):
    """Below it the answer is 'none of these'; null: never."""

    threshold: Annotated[float, Field(ge=0, le=1)] | None


class Rollback(Wanted):
    """The version to go back to; null: the one before."""

    number: Annotated[int, Field(ge=1, lt=2**53)] | None = None


class Named(Wanted):
    """What a picture shows; null: it is not known after all."""

    label: Name | None
