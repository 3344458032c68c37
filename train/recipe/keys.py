"""`resolute keys`: all recipe keys, as a table, or as the JSON Schema with which editors complete and check recipes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pydantic
from pydantic.json_schema import GenerateJsonSchema

from resolute.files import check_output, output_file
from resolute.settings import definitions
from resolute.train.options import KeysOptions

from .schema import Augment, Recipe, RecipeStage, Regularization

__all__ = ["Row", "keys", "main", "schema", "table"]

# In this draft, editors show everything that the recipe's types say: taplo knows 4 to 7
_DRAFT = "http://json-schema.org/draft-07/schema#"


@dataclass(frozen=True, kw_only=True)
class Row:
    section: str  # "" for the top of the file, "stages" for each [[stages]] table
    name: str
    kind: str  # type and range
    default: str
    help: str


def keys() -> Iterator[Row]:
    """Every recipe key: top-level keys first, then section by section in source order."""
    sections = {key.name: key.annotation for key in definitions(Recipe) if dataclasses.is_dataclass(key.annotation)}
    for section, cls in {
        "": Recipe,
        "stages": RecipeStage,
        **sections,
        "augment": Augment,
        "regularization": Regularization,
    }.items():
        for key in definitions(cls):
            if key.help:
                yield Row(section=section, name=key.name, kind=key.kind, default=_shown(key.default), help=key.help)


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


def schema() -> dict[str, Any]:
    """The JSON Schema of a recipe file: what TOML may hold, without the checks that compare several keys."""
    whole = pydantic.TypeAdapter(Recipe).json_schema(schema_generator=_TomlSchema)
    del whole["properties"]["name"]  # the file's
    whole["required"].remove("name")
    run = {name: {"$ref": f"#/$defs/{name.capitalize()}"} for name in ("augment", "regularization")}
    return {"$schema": _DRAFT, **whole, "properties": {**whole["properties"], **run}}


class _TomlSchema(GenerateJsonSchema):
    """Without null, which TOML does not have, in the words of `_DRAFT`."""

    def nullable_schema(self, schema: Any) -> Any:
        return self.generate_inner(schema["schema"])

    def tuple_schema(self, schema: Any) -> Any:
        made = super().tuple_schema(schema)
        if items := made.pop("prefixItems", []):  # they are alike
            made["items"] = items[0]
        return made

    def default_schema(self, schema: Any) -> Any:
        made = super().default_schema(schema)
        if made.get("default") is None or isinstance(made["default"], dict):  # a table's are those of its keys
            made.pop("default", None)
        return made

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def main(args: KeysOptions) -> None:
    """Run the command."""
    if args.schema is None:
        print(table())
        return
    check_output(args.schema, setting="--schema", suffixes=(".json",))
    with output_file(args.schema) as file:
        file.write((json.dumps(schema(), indent=2, ensure_ascii=False) + "\n").encode())
    print(args.schema)


def _shown(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "required"
    value = {} if dataclasses.is_dataclass(default) else default
    if isinstance(value, float):
        value = round(value, 4) if abs(value) >= 1e-3 else value
    if isinstance(value, tuple):
        value = [round(item, 4) if isinstance(item, float) else item for item in value]
    return "none" if value is None else f"`{json.dumps(value)}`"
