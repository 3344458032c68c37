"""What a report shows: the data of its charts and the text of its tables."""

from __future__ import annotations

import html
import json
import re
from typing import Any

__all__ = ["charts", "rows"]


def charts(text: str) -> dict[str, dict[str, Any]]:
    """The data of the charts, by title."""
    titles = re.findall(r'aria-label="([^;"]+); x: ', text)
    return dict(zip(titles, map(json.loads, re.findall(r'application/json">(.+?)</script>', text)), strict=True))


def rows(text: str, table: str = "") -> list[list[str]]:
    """The cells of each row of the table with that name, by default of all tables."""
    if table:
        text = text.partition(f'<table aria-label="{table}">')[2].partition("</table>")[0]
    found = (re.findall(r"<t[dh]\b[^>]*>(.*?)</t[dh]>", row) for row in text.split("<tr>")[1:])
    return [[html.unescape(cell) for cell in row] for row in found]
