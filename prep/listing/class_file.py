"""Reads CLASSES: the names of the classes in a file, one per line, or with their numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.prep.sources.tables.forms import is_text, is_utf16, not_utf8

__all__ = ["ClassFile", "read_classes"]

# A number and a name, between them blanks, one of , ; : =, a dash between blanks, or the sign of "1. " or "1) ".
_NUMBER_FIRST = re.compile(r"([0-9]{1,9})(?:\s*[,;:=]\s*|[.)]\s+|\s+-\s+|\s+)(\S.*)")
_NUMBER_LAST = re.compile(r"(\S.*?)(?:\s*[,;:=]\s*|\s+-\s+|\s+)([0-9]{1,9})")
# Headers of columns, in lower case.
_NAME_COLUMN = re.compile(r"((class|label|category)[ _]?)?(names?|labels?|class|classes|category|categories)")
_COLUMN = re.compile(rf"{_NAME_COLUMN.pattern}|((class|label|category)[ _]?)?(ids?|idx|index|num|number|no|code)")
_YAML = re.compile(r"(names|nc|train|val|path)\s*:(\s.*)?|item\s*\{|---|- \S.*")
_AS_JSON = 'write the names as a JSON list, ["…", "…"]'


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
    if found := _from_pairs(path, lines):
        return found
    _refuse_other_forms(path, lines)
    if all(len(line) > 2 and line[0] == line[-1] == '"' for line in lines):
        lines = [line[1:-1].replace('""', '"') for line in lines]
    return ClassFile(path=str(path), names=_different(path, lines, "lines"))


def _from_json(path: Path, text: str) -> ClassFile:
    try:
        found: Any = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise ResoluteError(
            f"{path}: got '{' '.join(str(error).split())[:80]}', expected JSON, as it begins with {text.lstrip()[0]}; "
            "correct CLASSES"
        ) from None
    if isinstance(found, list) and not isinstance(found, _Pairs) and found and all(map(_is_name, found)):
        return ClassFile(path=str(path), names=_different(path, found, "places"))
    pairs: list[tuple[str, str]] = []
    if isinstance(found, _Pairs):
        if all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for _, number in found):
            pairs = [(str(number), name) for name, number in found if _is_name(name)]
        elif all(re.fullmatch("[0-9]{1,9}", number) for number, _ in found):
            pairs = [(number, name) for number, name in found if _is_name(name)]
    if not pairs or len(pairs) < len(found):
        raise ResoluteError(
            f'{path}: got {text.strip()[:80]!r}, expected a map of numbers and names, {{"0": "cat", "1": "dog"}}, or a '
            'list of names, ["cat", "dog"]; correct CLASSES'
        )
    numbers = [int(number) for number, _ in pairs]
    if len(set(numbers)) < len(numbers):
        raise ResoluteError(f"{path}: got a number for two classes, expected each once; correct CLASSES")
    return _map(path, numbers, [name for _, name in pairs])


class _Pairs(list[tuple[str, Any]]):
    """The members of a JSON object, of which some may have the same name."""


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and is_text(value)


def _from_pairs(path: Path, lines: Sequence[str]) -> ClassFile | None:
    """Lines that all hold a number and a name, perhaps below a header; None if they are names.

    Raises `ResoluteError` for lines that are nearly so.
    """
    for pattern, number, name in ((_NUMBER_FIRST, 1, 2), (_NUMBER_LAST, 2, 1)):
        matches = [pattern.fullmatch(line) for line in lines]
        header = int(len(lines) > 1 and matches[0] is None and _is_header(lines[0]))
        found = [match for match in matches[header:] if match is not None]
        numbers = [int(match[number]) for match in found]
        names = [match[name].strip().strip('"') for match in found]
        if not found or len(set(names)) < len(names):  # such as Grade 1, Grade 2
            continue
        in_order = sorted(set(numbers))
        counts_up = in_order in ([*range(len(in_order))], [*range(1, len(in_order) + 1)])
        if len(found) < len(lines) - header:
            if counts_up and len(in_order) == len(found) > 1 and 2 * len(found) >= len(lines):
                n = matches.index(None, header)
                raise ResoluteError(
                    f"{path}: line {n + 1}: got {lines[n]!r}, expected a number and a name, as in "
                    f"{found[0].string!r}; correct it, or {_AS_JSON} if the numbers are parts of names"
                )
            continue
        is_repeated = len(in_order) < len(found)
        if is_repeated and not counts_up:  # such as years
            continue
        if is_repeated or not counts_up:
            raise ResoluteError(
                f"{path}: each line holds a number, got {lines[header]!r} and {lines[-1]!r}, expected different "
                f"numbers from 0 or 1 without gaps, or names alone; correct it, or {_AS_JSON} if the numbers are parts "
                "of names"
            )
        sign = found[0].string[found[0].end(1) : found[0].start(2)].strip(" ")
        if sign in ("\t", ",", ";") and all(sign in each for each in names):
            raise ResoluteError(
                f"{path}: line {header + 1}: got {found[0].string[:80]!r}, which has {names[0].count(sign) + 2} "
                "fields, expected a number and a name; leave only these"
            )
        return _map(path, numbers, names)
    return None


def _is_header(line: str) -> bool:
    """Whether a line above numbers and names says what these are: "id,name", "class id", or ",name" as pandas does."""
    if re.fullmatch(r"[A-Za-z_]+\s*[,;\t]\s*[A-Za-z_]+", line):
        return True
    fields = [field.strip().strip('"').lower() for field in re.split(r"[,;\t]", line)]
    fields = fields if len(fields) > 1 else line.lower().split()
    return all(not field or _COLUMN.fullmatch(field) for field in fields)


def _refuse_other_forms(path: Path, lines: Sequence[str]) -> None:
    """Raise `ResoluteError` for lines that are not names alone."""
    for n, line in enumerate(lines, start=1):
        if _YAML.fullmatch(line) and (n == 1 or not line.startswith("-")):
            got = "YAML or another form"
        elif "\t" in line:
            got = "a tab"
        elif n == 1 and line.startswith("#"):
            got = "a remark"
        elif n == 1 and len(lines) > 1 and _NAME_COLUMN.fullmatch(line.strip('"').lower()):
            got = "the name of a column"
        elif len(lines) == 1 and re.search("[,;]", line):
            got = "several names"
        else:
            continue
        raise ResoluteError(
            f"{path}: line {n}: got {line[:80]!r}, which looks like {got}, expected one class name per line alone; "
            f"correct it, or {_AS_JSON}"
        )


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
