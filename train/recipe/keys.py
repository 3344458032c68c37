"""`resolute keys`: all recipe keys from the dataclasses: key, type, range, default and help."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from resolute.pipeline.plan.recipe_key import range_text
from resolute.train.options import KeysOptions

from .schema import Augment, Recipe, Regularization, Stage

__all__ = ["Row", "keys", "main", "table"]


@dataclass(frozen=True, kw_only=True)
class Row:
    section: str  # "" for the top of the file, "stages" for each [[stages]] table
    name: str
    kind: str  # type and range
    default: str
    help: str


def keys() -> Iterator[Row]:
    """Every recipe key: top-level keys first, then section by section in source order."""
    sections = {name: hint for name, hint in typing.get_type_hints(Recipe).items() if dataclasses.is_dataclass(hint)}
    for section, cls in {"": Recipe, "stages": Stage, **sections, "augment": Augment,
                         "regularization": Regularization}.items():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if "help" in field.metadata:
                kind = ", ".join(filter(None, (_kind(hints[field.name]), range_text(field.metadata["bounds"]))))
                yield Row(section=section, name=field.name, kind=kind, default=_default(field),
                          help=field.metadata["help"])  # fmt: skip


def table() -> str:
    """All keys in Markdown, one table per section."""
    lines, section = [], None
    for key in keys():
        if key.section != section:
            section = key.section
            title = {"": "top of the file", "stages": "`[[stages]]`"}.get(section, f"`[{section}]`")
            lines += ["", f"### {title}", "", "| key | value | default | meaning |", "|---|---|---|---|"]
        cells = (f"`{key.name}`", key.kind, key.default, key.help)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:])


def main(_: KeysOptions) -> None:
    """Run the command."""
    print(table())


def _kind(hint: Any) -> str:
    if dataclasses.is_dataclass(hint):
        return "table"
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_kind(arg) for arg in args if arg is not types.NoneType)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(arg)}`" for arg in args)
    if origin is tuple:
        return "list of numbers" if args[-1] is Ellipsis else f"{len(args)} numbers"
    names = {int: "integer", float: "number", bool: "`true`, `false`", str: "text", dict: "table"}
    return names[origin or hint]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = {} if dataclasses.is_dataclass(field.default_factory) else field.default_factory()
    else:
        return "required"
    if isinstance(value, float):
        value = round(value, 4) if abs(value) >= 1e-3 else value
    if isinstance(value, tuple):
        value = [round(item, 4) if isinstance(item, float) else item for item in value]
    return "none" if value is None else f"`{json.dumps(value)}`"
