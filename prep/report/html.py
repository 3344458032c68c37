"""Building blocks of the report: one self-contained HTML page, in light and dark mode."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "Raw", "bars", "escape", "figure", "heading", "page", "picture", "section", "sheet", "table", "text", "tiles",
]  # fmt: skip

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #66707d; --line: #dfe3e8; --card: #fff; --page: #f5f6f8;
  --bar: #3b7dd8; --warn: #b3541e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #98a2b0; --line: #303843; --card: #1b2028; --page: #12161c; --bar: #4f8fe6;
    --warn: #e88d55; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 18px; margin: 0 0 12px; } h3 { font-size: 15px; margin: 20px 0 6px; }
p { margin: 6px 0; } .soft { color: var(--soft); } .warn { color: var(--warn); font-weight: 600; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 20px; margin: 20px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 12px; margin: 20px 0; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.tiles b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
th.n, td.n { text-align: right; white-space: nowrap; }
summary { cursor: pointer; font-weight: 600; padding: 6px 0; }
.sheet { display: flex; flex-wrap: wrap; gap: 12px; align-items: flex-end; padding: 8px 0; }
.sheet figure { margin: 0; } .sheet img { display: block; border-radius: 3px; max-width: 100%; }
.sheet figcaption { font-size: 12px; color: var(--soft);
  overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.chart { display: block; width: 100%; height: auto; margin-top: 8px; }
.bars { display: grid; grid-template-columns: minmax(60px, max-content) 1fr max-content; gap: 3px 12px;
  align-items: center; font-variant-numeric: tabular-nums; }
.bars .name { max-width: 320px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.bars .bar { height: 14px; border-radius: 3px; background: var(--bar); min-width: 1px; }
.bars .count { text-align: right; color: var(--soft); }
"""


@dataclass(frozen=True)
class Raw:
    """Ready HTML; anything else is text and gets escaped."""

    text: str


def escape(text: object) -> str:
    """Text as HTML; characters without a glyph (control and direction marks, invalid bytes) as their escapes."""
    visible = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))
    return html.escape(visible)


def _cell(value: object) -> str:
    return value.text if isinstance(value, Raw) else escape(value)


def page(title: str, where: str, parts: Iterable[Raw]) -> bytes:
    """A complete HTML document, UTF-8."""
    body = "\n".join(part.text for part in parts)
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f'<body><main><h1>{escape(title)}</h1><p class="soft">{escape(where)}</p>\n{body}\n</main></body></html>\n'
    )
    return text.encode()


def section(heading: str, parts: Iterable[Raw]) -> Raw:
    return Raw(f"<section><h2>{escape(heading)}</h2>\n{''.join(part.text for part in parts)}</section>")


def text(words: str, kind: str = "") -> Raw:
    """A paragraph; `kind`: `soft`, `warn`, or none."""
    return Raw(f'<p class="{kind}">{escape(words)}</p>\n')


def heading(words: str) -> Raw:
    return Raw(f"<h3>{escape(words)}</h3>\n")


def tiles(numbers: Iterable[tuple[object, str]]) -> Raw:
    """A row of tiles, each a (number, what it counts)."""
    cells = "".join(
        f'<div><b>{escape(number)}</b><span class="soft">{escape(what)}</span></div>' for number, what in numbers
    )
    return Raw(f'<div class="tiles">{cells}</div>')


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Raw:
    """A table of text; columns whose heading ends with `#` hold numbers and are right-aligned."""
    kinds = [' class="n"' if head.endswith("#") else "" for head in heads]
    top = "".join(f"<th{kind}>{escape(head.rstrip('#'))}</th>" for head, kind in zip(heads, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{_cell(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>\n"
        for row in rows
    )
    return Raw(f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>\n')


def bars(rows: Sequence[tuple[str, float, str]]) -> Raw:
    """Horizontal bars of (name, value, value in words), scaled to the largest."""
    longest = max([value for _, value, _ in rows], default=0.0) or 1.0
    cells = "".join(
        f'<span class="name" title="{escape(name)}">{escape(name)}</span>'
        f'<div class="bar" style="width:{100 * value / longest:.2f}%"></div>'
        f'<span class="count">{escape(words)}</span>\n'
        for name, value, words in rows
    )
    return Raw(f'<div class="bars">{cells}</div>')


def picture(data: bytes, kind: str, *, alt: str, width: int = 0, height: int = 0) -> str:
    """An <img> with embedded bytes; `width` and `height` in CSS px, or 0 for a chart as wide as the page."""
    size = f'width="{width}" height="{height}"' if width else 'class="chart"'
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
    return f'<img {size} alt="{escape(alt)}" src="{source}">'


def figure(image: str, caption: str, title: str, width: int) -> str:
    return (
        f'<figure style="width:{width}px;max-width:100%" title="{escape(title)}">{image}'
        f"<figcaption>{escape(caption)}</figcaption></figure>\n"
    )


def sheet(summary: str, figures: Iterable[str], *, opened: bool) -> Raw:
    """A collapsible contact sheet of figures."""
    state = " open" if opened else ""
    return Raw(
        f'<details{state}><summary>{escape(summary)}</summary><div class="sheet">\n{"".join(figures)}</div></details>\n'
    )
