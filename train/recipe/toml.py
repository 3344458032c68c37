"""Recipe values as TOML text; `tomllib.loads` gives the same values back."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["recipe_text"]


def recipe_text(values: dict[str, Any], table: str = "", *, many: bool = False) -> str:
    """The values as TOML; None and empty tables are omitted. `many`: `table` is one of an array of tables."""
    plain = {key: value for key, value in values.items() if value is not None and not _is_table(value)}
    text = "\n".join(f"{_toml_key(key)} = {_toml_value(value)}" for key, value in plain.items())
    head = "" if not table else f"[[{table}]]\n" if many else f"[{table}]\n"
    text = f"{head}{text}\n\n" if plain or many else ""
    for key, value in values.items():
        name = f"{table}.{_toml_key(key)}" if table else _toml_key(key)
        if isinstance(value, dict):
            text += recipe_text(value, name)
        elif _is_table(value):
            text += "".join(recipe_text(item, name, many=True) for item in value)
    return text


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_value(name)


def _toml_value(value: Any) -> str:
    # why: TOML knows no pairs of \\u escapes, and no unescaped control characters, of which JSON leaves one
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_table(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))
