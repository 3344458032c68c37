"""Which rows of a table are trained on and which are validated on, as one of its columns says, or asks about."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from resolute.errors import ResoluteError

__all__ = ["LEFT_OUT", "Part", "SplitSetting", "looks_like_a_split", "one_group_pattern", "parse_split", "question"]

Part = Literal["train", "val"]
LEFT_OUT = "of other parts"  # how photos and rows are counted that are neither trained nor validated on
_USUAL: dict[str, Part | None] = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": None,
    "testing": None,
}
# Names of columns that usually divide a table, in lower case and without "_", "-" and spaces; others do if their values
# are words such as train
_NAMES = re.compile(
    r"(data)?(split|subset|partition|fold)s?(name|id|no)?|is(train|training|test|val|valid|validation)(image)?"
    r"|train(or)?(test|val)(split)?"
)
_MOST_VALUES = 20  # a column with more different cells divides nothing


@dataclass(frozen=True, kw_only=True)
class SplitSetting:
    """The setting SPLIT: a column, or a pattern with one group for the names of photos, and what the values mean.

    `values`: those of the setting, a part or None for what is left out, by value in lower case; `rest`: of all others.
    """

    text: str
    column: str = ""
    pattern: re.Pattern[str] | None = None
    values: Mapping[str, Part | None] = field(default_factory=dict)
    has_rest: bool = False
    rest: Part | None = None

    def part(self, value: Any, where: str) -> Part | None:
        """The part of a photo with this value, None if it is left out. Raises `ResoluteError` for other values."""
        text = str(value if value is not None else "").strip().lower()
        if text in self.values:
            return self.values[text]
        if text in _USUAL:
            return _USUAL[text]
        if self.has_rest:
            return self.rest
        shown = ", ".join(f"{known}={part or 'none'}" for known, part in {**_USUAL, **self.values}.items())
        raise ResoluteError(
            f"{where}: a value of SPLIT without a meaning, got {str(value)[:40]!r}, expected one of {shown}; say what "
            f"it means, as in SPLIT={self.column or 'column'}:{str(value)[:40] or 'value'}=train,other=val,test=none"
        )


def one_group_pattern(text: str, setting: str, what: str) -> re.Pattern[str]:
    """The regular expression of a setting. Raises `ResoluteError` if it is none, or has not one group; `what` it is."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ResoluteError(f"{setting}: got {text}, which is no regular expression ({error}); correct it") from None
    if pattern.groups != 1:
        raise ResoluteError(
            f"{setting}: got {text} with {pattern.groups} groups, expected one, {what}; write others as (?:…)"
        )
    return pattern


def parse_split(text: str) -> SplitSetting:
    """The setting of a text: `column`, `column:value=train,value=val,value=none,*=train`, or a pattern with a group.

    Raises `ResoluteError` for another text.
    """
    if "(" in text:
        return SplitSetting(text=text, pattern=one_group_pattern(text, "SPLIT", "which matches train or val"))
    column, colon, words = text.partition(":")
    values: dict[str, Part | None] = {}
    rest: tuple[Part | None, ...] = ()
    for word in words.split(",") if colon else ():
        value, sign, name = (each.strip() for each in word.rpartition("="))
        meant = {"train": "train", "val": "val", "none": None}
        if not sign or name not in meant:
            raise ResoluteError(
                f"SPLIT: got {word}, expected VALUE=train, VALUE=val or VALUE=none (left out); write it as "
                f"SPLIT={column}:test=val"
            )
        if value == "*":
            rest = (meant[name],)  # type: ignore[assignment]
        else:
            values[value.lower()] = meant[name]  # type: ignore[assignment]
    if not column.strip():
        raise ResoluteError(f"SPLIT: got {text!r}, expected the name of a column; correct it")
    return SplitSetting(
        text=text, column=column.strip(), values=values, has_rest=bool(rest), rest=rest[0] if rest else None
    )


def looks_like_a_split(name: str, cells: Iterable[Any]) -> str | None:
    """Words about the values of a column if it seems to divide the rows into parts, else None."""
    counts = Counter(str(cell).strip() for cell in cells)
    if not 2 <= len(counts) <= _MOST_VALUES:
        return None
    is_usual = sum(count for value, count in counts.items() if value.lower() in _USUAL) > 0.5 * counts.total()
    if not is_usual and _NAMES.fullmatch(re.sub(r"[ _-]", "", name.lower())) is None:
        return None
    return ", ".join(f"{value or 'blank'} ({count} rows)" for value, count in counts.most_common(6))


def question(path: str, name: str, cells: Iterable[Any], words: str) -> ResoluteError:
    """The error that asks about a column; `words`: those about its values."""
    values = sorted({str(cell).strip() for cell in cells})
    use = f"SPLIT={name} uses it (photos of test are left out)"
    if not all(value.lower() in _USUAL for value in values):
        of_val = values[-1] if re.search("val|test", name.lower()) else values[0]
        use = f"to use it, say what its values mean, such as SPLIT={name}:{of_val}=val,*=train"
    return ResoluteError(
        f"{path}: column {name} may say which photos are trained and which are validated on, got {words}, expected an "
        f"answer; {use}; with SPLIT=none it divides nothing"
    )
