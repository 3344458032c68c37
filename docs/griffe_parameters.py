"""Extension of griffe for the API page: aligned columns of docstrings become lists, and classes list their fields."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import griffe

# "name, other   text" of a parameter; lines indented further continue its text
ROW = re.compile(r"^(\w+(?:, \w+)*) {2,}(\S.*)$")


class Parameters(griffe.Extension):
    """Rewrites the docstring of every object that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = "\n\n".join(map(_as_list, re.split(r"\n\s*\n", obj.docstring.value)))

    def on_class_instance(self, *, node: Any, cls: griffe.Class, **_: Any) -> None:
        """Append the fields of a dataclass or of settings to its docstring, each with type, default and meaning."""
        decorated = any(
            re.match(r"(dataclasses\.)?(dataclass|settings)\b", ast.unparse(each)) for each in node.decorator_list
        )
        if decorated and cls.docstring and isinstance(cls.filepath, Path):
            lines = cls.filepath.read_text(encoding="utf-8").splitlines()
            rows = [_field(each, lines) for each in node.body if isinstance(each, ast.AnnAssign)]
            cls.docstring.value += "\n\n" + "\n".join(filter(None, rows))


def _field(node: ast.AnnAssign, lines: list[str]) -> str:
    """A field as an item of a list; "" if it is private. lines: of its file."""
    name, kind, default, meaning = ast.unparse(node.target), ast.unparse(node.annotation), "", ""
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)]
    for call in calls:
        words = [ast.literal_eval(each) for each in call.args if _is_text(each)]
        if call.func.id == "setting":
            default, meaning = ast.unparse(call.args[0]), words[-1]
        elif call.func.id == "described":
            meaning = words[0]
            kind = re.sub(r"^Annotated\[(.*), described\(.*$", r"\1", kind)
    if not calls and node.value:
        default = ast.unparse(node.value)
    if name.startswith("_"):
        return ""
    meaning = meaning or _comment(node, lines)
    return f"- `{name}: {kind}{f' = {default}' if default else ''}`{f': {meaning}' if meaning else ''}"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _comment(node: ast.AnnAssign, lines: list[str]) -> str:
    """The comment at the end of a field's line, or on the lines above it."""
    assert node.end_lineno is not None
    beside = lines[node.end_lineno - 1].partition("  # ")[2]
    above: list[str] = []
    while (line := lines[node.lineno - 2 - len(above)].strip()).startswith("#"):
        above.insert(0, line.removeprefix("# "))
    return beside or " ".join(above)


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
