"""The setting GROUP, and columns of a table that seem to say which photos belong together, such as of one patient."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .split_column import one_group_pattern

__all__ = ["GroupSetting", "hint_at_group", "parse_group"]

_FILES = (".csv", ".tsv", ".txt")
_THINGS = (
    "patient|subject|person|participant|identity|individual|animal|lesion|case|study|exam|session|visit|admission|video|"
    "clip|recording|sequence|scene|burst|shot|track|product|item|article|specimen|plant|tree|slide|biopsy|donor|"
    "volunteer|user|author|photographer|observer|camera|trap|site|location|station|house|plot|group|cluster|source|"
    "original|parent"
)
# In lower case and without "_", "-" and spaces.
_NAMES = re.compile(rf"(?:(?:{_THINGS})(?:s|es)?)(?:id|ids|no|nr|num|number|name|key|code|index|uid|group)?")


@dataclass(frozen=True, kw_only=True)
class GroupSetting:
    """The setting GROUP: the name of a `column`, a `pattern` for the names of photos, or a `file`."""

    text: str
    column: str | None = None
    pattern: re.Pattern[str] | None = None
    file: str | None = None


def parse_group(text: str | None) -> GroupSetting | None:
    """The setting of a text; None for `none` and without one. Raises `ResoluteError` for a wrong pattern."""
    if text in (None, "none"):
        return None
    assert text is not None
    if text.lower().endswith(_FILES):
        return GroupSetting(text=text, file=text)
    if "(" not in text:
        return GroupSetting(text=text, column=text.strip())
    return GroupSetting(text=text, pattern=one_group_pattern(text, "GROUP", "whose text names the group of a photo"))


def hint_at_group(path: str, name: str, cells: Iterable[Any]) -> str | None:
    """The line about a column with a usual name and with cells that several rows share; None for another column."""
    if _NAMES.fullmatch(re.sub(r"[ _.-]", "", name.lower())) is None:
        return None
    counts = Counter(text for cell in cells if (text := str(cell if cell is not None else "").strip()))
    value, most = counts.most_common(1)[0] if counts else ("", 0)
    if len(counts) < 2 or most < 2:
        return None
    # why no number: the cells may be those of the first rows only
    return (
        f"{path}: column {name} may say which photos belong together, such as the rows with {value[:40]}; "
        f"GROUP={name} keeps each group on one side of the split, GROUP=none hides this line"
    )
