"""Extension of griffe: parameters that a docstring describes in aligned columns become a list on the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

# "name, other   text" of a parameter; lines indented further continue its text
ROW = re.compile(r"^(\w+(?:, \w+)*) {2,}(\S.*)$")


class Parameters(griffe.Extension):
    """Rewrites the docstring of every object that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = "\n\n".join(map(_as_list, re.split(r"\n\s*\n", obj.docstring.value)))


def _as_list(paragraph: str) -> str:
    """The paragraph, as a Markdown list if each of its lines is a parameter or continues one."""
    rows: list[str] = []
    for line in paragraph.splitlines():
        row = ROW.match(line)
        if row:
            rows.append(f"- {', '.join(f'`{name}`' for name in row[1].split(', '))}: {row[2]}")
        elif rows and line.startswith("  "):
            rows[-1] += f" {line.strip()}"
        else:
            return paragraph
    return "\n".join(rows)
