"""Renders self-contained HTML pages, in light and dark mode, from autoescaped jinja2 templates.

The template of a page extends `base.html` in this folder and imports tables, tiles, bars and charts from `parts.html`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

    from .charts import Chart

__all__ = ["figures_page", "load", "render"]


def render(template: Path, **values: Any) -> bytes:
    """The page of `template` with `values`, UTF-8. All values are text and are escaped.

    Characters without a glyph (control and direction marks, invalid bytes) are shown as their escapes.
    """
    page = _environment(template.parent).get_template(template.name).render(values)
    return page.encode()


def figures_page(
    *,
    title: str,
    subtitle: str,
    numbers: Sequence[tuple[str, str]] = (),
    findings: Sequence[str] = (),
    charts: Iterable[Chart | None] = (),
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[Any]], str]] = (),
    sheets: Sequence[tuple[str, Sequence[Mapping[str, Any]]]] = (),
) -> bytes:
    """A page of these parts, in this order; parts without content are left out.

    `numbers`: tiles, as the macro of parts.html takes them. `findings`: sentences, code between backticks. `tables`:
    (heading, heads, rows, note). `sheets`: (heading, figures as the macro `sheet` takes them, WebP).
    """
    return render(
        Path(__file__).with_name("figures.html"),
        title=title,
        subtitle=subtitle,
        numbers=numbers,
        findings=findings,
        charts=[*filter(None, charts)],
        tables=tables,
        sheets=sheets,
    )


def load(template: Path) -> None:
    """Load `template` and what it includes; `render` then takes a tenth of a second less."""
    for name in (template.name, "base.html", "parts.html"):
        _environment(template.parent).get_template(name)


@cache
def _environment(folder: Path) -> jinja2.Environment:
    import jinja2  # why here: slow, and commands that write no page do not need it

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {"base64": _base64, "code": _code, "thousands": "{:,}".format}
    return environment


def _visible(value: object) -> object:
    """Applied to every printed value; markup of templates and filters passes unchanged."""
    if hasattr(value, "__html__"):
        return value
    text = str(value)
    return text if text.isprintable() else "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def _base64(data: bytes) -> Markup:
    from markupsafe import Markup

    return Markup(base64.b64encode(data).decode("ascii"))


def _code(text: str) -> Markup:
    """Text in which parts between backticks are set as code."""
    from markupsafe import Markup, escape

    # why str: the sub of a Markup would escape the tags
    return Markup(re.sub("`(.+?)`", r"<code>\1</code>", str(escape(_visible(text)))))
