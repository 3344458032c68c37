"""Which keys has a recipe? A table made of the dataclasses themselves: key, type, default and comment."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import json
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .schema import Recipe

__all__ = ["Key", "keys", "table"]


@dataclass(frozen=True, kw_only=True)
class Key:
    section: str  # "" for the top of the file, "stages" for each [[stages]] table
    name: str
    kind: str
    default: str
    comment: str  # "" where the source has none


def keys(cls: type = Recipe, section: str = "") -> Iterator[Key]:
    """Every key of a recipe, those of the file's top first, then a section after the other, as in the source."""
    hints, comments = typing.get_type_hints(cls), _comments(cls)
    sections = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if typing.get_origin(hint) is tuple and dataclasses.is_dataclass(typing.get_args(hint)[0]):
            hint = typing.get_args(hint)[0]
        if dataclasses.is_dataclass(hint):
            if cls is Recipe:  # why: a stage's [augment] is that of the file
                sections[field.name] = hint
        elif not (cls is Recipe and field.name == "name"):  # the file's own
            yield Key(section=section, name=field.name, kind=_kind(hint), default=_default(field),
                      comment=comments[field.name])  # fmt: skip
    for name, hint in sections.items():
        yield from keys(typing.cast(type, hint), name)
    if cls is Recipe:
        (augment,) = (f for f in dataclasses.fields(typing.get_args(hints["stages"])[0]) if f.name == "augment")
        yield from keys(typing.cast(type, augment.default_factory), "augment")


def table() -> str:
    """All keys in Markdown, a table a section."""
    lines, section = [], None
    for key in keys():
        if key.section != section:
            section = key.section
            title = {"": "top of the file", "stages": "`[[stages]]`"}.get(section, f"`[{section}]`")
            lines += ["", f"### {title}", "", "| key | value | default | |", "|---|---|---|---|"]
        cells = (f"`{key.name}`", key.kind, key.default, key.comment)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:])


def _comments(cls: type) -> dict[str, str]:
    """The comment of each field: the lines right above it, and what stands behind it."""
    source = textwrap.dedent(inspect.getsource(cls))
    alone: dict[int, str] = {}
    behind: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            first = not token.line[: token.start[1]].strip()
            (alone if first else behind)[token.start[0]] = token.string.lstrip("# ")
    found = {}
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            line = node.lineno
            while line - 1 in alone:
                line -= 1
            above = " ".join(alone[number] for number in range(line, node.lineno))
            parts = [above, behind.get(node.end_lineno or node.lineno, "")]
            found[node.target.id] = "; ".join(part for part in parts if part)
    return found


def _kind(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _kind(next(arg for arg in args if arg is not types.NoneType))
    if origin is Literal:
        return ", ".join(f"`{json.dumps(arg)}`" for arg in args)
    if origin is tuple:
        many = args[-1] is Ellipsis
        return "list of numbers" if many else f"{len(args)} numbers"
    names = {int: "integer", float: "number", bool: "`true`, `false`", str: "text", dict: "table"}
    return names[origin or hint]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "needed"
    if isinstance(value, float):
        value = round(value, 4) if abs(value) >= 1e-3 else value
    if isinstance(value, tuple):
        value = [round(item, 4) if isinstance(item, float) else item for item in value]
    return "none" if value is None else f"`{json.dumps(value)}`"
