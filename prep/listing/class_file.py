"""Reads CLASSES: the names of the classes in a file, one per line, or with their numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.prep.sources.table_forms import is_text, is_utf16, not_utf8

__all__ = ["ClassFile", "read_classes"]

_NUMBER_FIRST = re.compile(r"(\d+)[\s,;:]+(\S.*)")
_NUMBER_LAST = re.compile(r"(.*\S)[\s,;]+(\d+)")
_AS_JSON = 'write the names as a JSON list, ["…", "…"], if the numbers are parts of names'


@dataclass(frozen=True, kw_only=True)
class ClassFile:
    """The classes that a file names, in the order of their class numbers.

    `numbers` maps the labels of a source that are numbers to class numbers, where the file says them; None: label n is
    class n. `about` says in a line how the file was read, if it holds more than names.
    """

    path: str
    names: tuple[str, ...]
    numbers: Mapping[str, int] | None = None
    about: str | None = None


def read_classes(path: Path) -> ClassFile:
    """The names in a text file, one per line: line n (from 0) names class n. Or a map, in lines of a number and a name
    or in JSON; or a list in JSON.

    Raises `ResoluteError` if the file is unreadable, empty or not UTF-8, holds an empty line or a duplicate name, or
    could be read in several ways.
    """
    try:
        text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise ResoluteError(
            f"{path}: cannot be read, got {error.strerror}, expected a file with one class name per line; "
            "correct CLASSES"
        ) from None
    if is_utf16(text):
        raise not_utf8(path, 1, "UTF-16")
    if text.lstrip().startswith(("{", "[")):
        return _from_json(path, text)
    lines = [line.strip() for line in text.rstrip().split("\n")]
    for n, line in enumerate(lines, start=1):
        if not line:
            raise ResoluteError(
                f"{path}: line {n} is empty, expected one class name per line, because line numbers are class numbers; "
                "name the class or remove the line"
            )
        if not is_text(line):
            raise not_utf8(path, n, repr(line))
    return _from_pairs(path, lines) or ClassFile(path=str(path), names=_different(path, lines, "lines"))


def _from_json(path: Path, text: str) -> ClassFile:
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ResoluteError(
            f"{path}: got '{' '.join(str(error).split())[:80]}', expected JSON, as it begins with {text.lstrip()[0]}; "
            "correct CLASSES"
        ) from None
    if isinstance(found, list) and found and all(isinstance(name, str) and name for name in found):
        return ClassFile(path=str(path), names=_different(path, found, "places"))
    pairs: list[tuple[str, str]] = []
    if isinstance(found, dict) and found:
        if all(isinstance(number, int) and not isinstance(number, bool) for number in found.values()):
            pairs = [(str(number), name) for name, number in found.items()]
        elif all(number.isascii() and number.isdecimal() for number in found):
            pairs = [(number, name) for number, name in found.items() if isinstance(name, str)]
    if not pairs or len(pairs) < len(found):
        raise ResoluteError(
            f'{path}: got {text.strip()[:80]!r}, expected a map of numbers and names, {{"0": "cat", "1": "dog"}}, or a '
            'list of names, ["cat", "dog"]; correct CLASSES'
        )
    numbers = [int(number) for number, _ in pairs]
    if len(set(numbers)) < len(numbers):
        raise ResoluteError(f"{path}: got a number for two classes, expected each once; correct CLASSES")
    return _map(path, numbers, [name for _, name in pairs])


def _from_pairs(path: Path, lines: Sequence[str]) -> ClassFile | None:
    """Lines that all hold a number and a name, perhaps below a header; None if they are names."""
    for pattern, number, name in ((_NUMBER_FIRST, 1, 2), (_NUMBER_LAST, 2, 1)):
        matches = [pattern.fullmatch(line) for line in lines]
        header = int(matches[0] is None and re.fullmatch(r"[A-Za-z_]+\s*[,;\t]\s*[A-Za-z_]+", lines[0]) is not None)
        found = [match for match in matches[header:] if match is not None]
        if not found or len(found) < len(lines) - header:
            continue
        numbers = [int(match[number]) for match in found]
        if len(set(numbers)) < len(numbers):  # such as years
            continue
        if set(numbers) not in (set(range(len(numbers))), set(range(1, len(numbers) + 1))):
            raise ResoluteError(
                f"{path}: each line holds a number, got {lines[header]!r} and {lines[-1]!r}, expected numbers from 0 "
                f"or 1 without gaps, or names alone; correct it, or {_AS_JSON}"
            )
        return _map(path, numbers, [match[name].strip().strip('"') for match in found])
    return None


def _map(path: Path, numbers: Sequence[int], names: Sequence[str]) -> ClassFile:
    order = sorted(range(len(numbers)), key=lambda i: numbers[i])
    ordered = _different(path, [names[i] for i in order], "places")
    first, last = numbers[order[0]], numbers[order[-1]]
    return ClassFile(
        path=str(path),
        names=ordered,
        numbers={str(numbers[i]): n for n, i in enumerate(order)},
        about=f"{path}: read as a map of numbers and names: {first} is {ordered[0]}, {last} is {ordered[-1]}",
    )


def _different(path: Path, names: Sequence[str], what: str) -> tuple[str, ...]:
    """The names. Raises `ResoluteError` for one that occurs twice."""
    places: dict[str, int] = {}
    for n, name in enumerate(names, start=1):
        if places.setdefault(name, n) != n:
            raise ResoluteError(
                f"{path}: duplicate class, got {name} in {what} {places[name]} and {n}, expected it once; remove one"
            )
    return tuple(names)
