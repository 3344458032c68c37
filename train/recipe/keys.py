"""`resolute keys`: all recipe keys, as a table, or as the JSON Schema with which editors complete and check recipes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pydantic
from pydantic.json_schema import GenerateJsonSchema

from resolute.files import check_output, output_file
from resolute.settings import Setting, definitions, groups_by_kind
from resolute.train.options import KeysOptions

from .schema import Augment, Recipe, RecipeStage
from .stages import STAGE_KEYS

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
    yield from _rows("", {"": Recipe})
    yield from _rows("stages", {"": RecipeStage})
    for key in definitions(Recipe):
        if kinds := groups_by_kind(key.annotation):
            yield from _rows(key.name, kinds)
        elif dataclasses.is_dataclass(key.annotation):
            yield from _rows(key.name, {"": key.annotation})
    yield from _rows("augment", {"": Augment})


def _rows(section: str, kinds: Mapping[str, Any]) -> Iterator[Row]:
    """The keys of a section; of one with kinds, each key once, and which kinds have it unless all do."""
    found: dict[str, list[tuple[str, Setting]]] = {}
    for kind, cls in kinds.items():
        for key in definitions(cls):
            if key.help:
                found.setdefault(key.name, []).append((kind, key))
    for name in sorted(found, key=lambda name: name != "kind"):
        first = found[name][0][1]
        if name == "kind" and len(kinds) > 1:
            choices = ", ".join(f"`{json.dumps(kind)}`" for kind in kinds)
            help = "; ".join(f"{kind}: {key.help}" for kind, key in found[name])
            yield Row(section=section, name=name, kind=choices, default=_shown(first.default), help=help)
            continue
        owners = [kind for kind, _ in found[name]]
        help = first.help if len(owners) == len(kinds) else f"{', '.join(owners)}: {first.help}"
        yield Row(section=section, name=name, kind=first.kind, default=_shown(first.default), help=help)


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
    whole["properties"]["augment"] = {"$ref": "#/$defs/Augment"}
    stage = whole["$defs"]["RecipeStage"]["properties"]
    for section, names in STAGE_KEYS.items():
        if section != "augment":
            known = _properties(whole, section)
            own = {name: known[name] for name in names}
            about = {"description": stage[section]["description"], "type": "object"}
            stage[section] = {**about, "properties": own, "additionalProperties": False}
    return {"$schema": _DRAFT, **whole}


def _properties(whole: dict[str, Any], section: str) -> dict[str, Any]:
    """The properties of a section of the run, of all its kinds."""
    found: dict[str, Any] = {}
    place = whole["properties"][section]
    for reference in place.get("oneOf", [place]):
        found |= whole["$defs"][reference["$ref"].rpartition("/")[2]]["properties"]
    return found


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
