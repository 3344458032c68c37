"""`key`: a dataclass field that is a recipe key, with its type, default, help and allowed range in one place."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, TypeVar

from resolute.errors import check

__all__ = ["check_ranges", "described", "key", "range_text"]

T = TypeVar("T")

_WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}  # names of the bounds as in pydantic


def key(default: T, help: str, **bounds: float) -> T:
    """A field with a default. `bounds` (`gt`, `ge`, `lt`, `le`) hold for a number, or for each number of a tuple."""
    return dataclasses.field(default=default, metadata=described(help, **bounds))


def described(help: str, **bounds: float) -> dict[str, Any]:
    """The metadata of `key`, for a field without a default or with a `default_factory`."""
    return {"help": help, "bounds": bounds}


def range_text(bounds: dict[str, float]) -> str:
    """The range in words, such as "above 0, at most 1", or "1 to 4"; "" without bounds."""
    if {*bounds} == {"ge", "le"}:
        return f"{bounds['ge']} to {bounds['le']}"
    return ", ".join(f"{_WORDS[name]} {bound}" for name, bound in bounds.items())


def check_ranges(section: Any, prefix: str) -> None:
    """Raise `ResoluteError` for the first value of a dataclass that is outside of its key's range; None never is.

    `prefix`: what precedes a field's name in the name of its key, such as "optim.".
    """
    for field in dataclasses.fields(section):
        value, bounds = getattr(section, field.name), field.metadata.get("bounds")
        if bounds and value is not None:
            each = isinstance(value, tuple)
            good = all(getattr(operator, n)(v, b) for v in (value if each else [value]) for n, b in bounds.items())
            got, expected = (list(value), "each ") if each else (value, "")
            check(good, prefix + field.name, got, expected + range_text(bounds))
