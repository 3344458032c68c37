"""`python -m train keys`: all recipe keys from the dataclasses: key, type, default and the comment in the source."""

from __future__ import annotations

import argparse
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

__all__ = ["Key", "keys", "main", "table"]


@dataclass(frozen=True, kw_only=True)
class Key:
    section: str  # "" for the top of the file, "stages" for each [[stages]] table
    name: str
    kind: str
    default: str
    comment: str  # "" where the source has none


def keys(cls: type = Recipe, section: str = "") -> Iterator[Key]:
    """Every recipe key: top-level keys first, then section by section in source order."""
    hints, comments = typing.get_type_hints(cls), _comments(cls)
    sections = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if typing.get_origin(hint) is tuple and dataclasses.is_dataclass(typing.get_args(hint)[0]):
            hint = typing.get_args(hint)[0]
        if dataclasses.is_dataclass(hint):
            if cls is Recipe:  # why: [stages.augment] has the keys of the top-level [augment]
                sections[field.name] = hint
        elif not (cls is Recipe and field.name == "name"):  # why: the name is the file's
            yield Key(section=section, name=field.name, kind=_kind(hint), default=_default(field),
                      comment=comments[field.name])  # fmt: skip
    for name, hint in sections.items():
        yield from keys(typing.cast(type, hint), name)
    if cls is Recipe:
        (augment,) = (f for f in dataclasses.fields(typing.get_args(hints["stages"])[0]) if f.name == "augment")
        yield from keys(typing.cast(type, augment.default_factory), "augment")


def table() -> str:
    """All keys in Markdown, one table per section."""
    lines, section = [], None
    for key in keys():
        if key.section != section:
            section = key.section
            title = {"": "top of the file", "stages": "`[[stages]]`"}.get(section, f"`[{section}]`")
            lines += ["", f"### {title}", "", "| key | value | default | |", "|---|---|---|---|"]
        cells = (f"`{key.name}`", key.kind, key.default, key.comment)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:])


def main(_: argparse.Namespace) -> None:
    """Run the command."""
    print(table())


def _comments(cls: type) -> dict[str, str]:
    """The comment of each field: the lines directly above it, then the one at the end of its line."""
    source = textwrap.dedent(inspect.getsource(cls))
    full_line: dict[int, str] = {}
    trailing: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_full_line = not token.line[: token.start[1]].strip()
            (full_line if is_full_line else trailing)[token.start[0]] = token.string.lstrip("# ")
    comments = {}
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            line = node.lineno
            while line - 1 in full_line:
                line -= 1
            above = " ".join(full_line[number] for number in range(line, node.lineno))
            parts = [above, trailing.get(node.end_lineno or node.lineno, "")]
            comments[node.target.id] = "; ".join(part for part in parts if part)
    return comments


def _kind(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _kind(next(arg for arg in args if arg is not types.NoneType))
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
        value = field.default_factory()
    else:
        return "required"
    if isinstance(value, float):
        value = round(value, 4) if abs(value) >= 1e-3 else value
    if isinstance(value, tuple):
        value = [round(item, 4) if isinstance(item, float) else item for item in value]
    return "none" if value is None else f"`{json.dumps(value)}`"
