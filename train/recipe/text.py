"""A recipe as TOML text, before it is parsed: read from a file or made by a program, with values of `--set`."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError

from . import RECIPES
from .toml import recipe_text
from .upgrade import old_key

__all__ = ["RecipeText", "assignments"]

_KEY = r"[A-Za-z_][\w-]*(?:\[\d+\])?(?:\.[A-Za-z_][\w-]*(?:\[\d+\])?)*"


@dataclass(frozen=True, kw_only=True)
class RecipeText:
    """`toml`: the text. `name`: of the recipe, which names runs and pages. `where`: begins messages about it."""

    name: str
    toml: str
    where: str

    @classmethod
    def read(cls, path: str | Path, *, any_version: bool = False) -> RecipeText:
        """The text of a file. Raises `ResoluteError` if it cannot be read or is not TOML.

        It raises too, naming the command that translates it, for a recipe of an earlier version unless `any_version`.
        """
        path = Path(path)
        try:
            text = cls(name=path.stem, toml=path.read_text(encoding="utf-8-sig"), where=str(path))
        except OSError as error:
            advice = _meant(path)
            raise ResoluteError(
                f"{path.stem if path.parent == RECIPES else path}: no readable recipe ({error.strerror}), expected a "
                f"TOML file or the name of an included recipe; {advice}"
            ) from None
        except UnicodeDecodeError as error:
            raise ResoluteError(f"{path}: not TOML: {error}; correct that line") from None
        key = old_key(text.table())
        if key and not any_version:
            raise ResoluteError(
                f"{path}: got {key}, which only earlier versions have; translate the file with "
                f"`resolute recipe --upgrade {shlex.quote(str(path))}`"
            )
        return text

    def table(self) -> dict[str, Any]:
        """The parsed text. Raises `ResoluteError` if it is not TOML."""
        try:
            return tomllib.loads(self.toml)
        except tomllib.TOMLDecodeError as error:
            raise ResoluteError(f"{self.where}: not TOML: {error}; correct that line") from None

    def with_values(self, settings: Sequence[str]) -> RecipeText:
        """The recipe with the values of `settings`, as `--set` takes them, in place of its own.

        Raises `ResoluteError` for what is not KEY=VALUE, and for a key that leads nowhere.
        """
        if not settings:
            return self
        table = self.table()
        for key, value in assignments(settings).items():
            _assign(table, key, value)
        shown = " ".join(settings)
        text = f"# {self.where} with --set {shown}".replace("\n", " ") + f"\n\n{recipe_text(table)}"
        return dataclasses.replace(self, toml=f"{text.rstrip()}\n", where=f"{self.where} with --set {shown}")


def _meant(path: Path) -> str:
    """Advice on a recipe that is not there: files and included recipes with a name like its own."""
    names = sorted(file.stem for file in RECIPES.glob("*.toml"))
    with contextlib.suppress(OSError):
        beside = [] if path.parent == RECIPES else [str(file) for file in path.parent.glob("*.toml")]
        near = difflib.get_close_matches(path.name, [Path(file).name for file in beside], n=1)
        near = [str(path.parent / name) for name in near] or [name for name in names if path.stem.lower() in name]
        near = near or difflib.get_close_matches(path.stem, names, n=2)
        if near:
            return f"did you mean {' or '.join(near)}?"
    return f"included are {', '.join(names)}"


def assignments(settings: Sequence[str]) -> dict[str, Any]:
    """{key: value} of texts such as "optim.lr=0.1"; a text may hold several, separated by blanks.

    A value is read as TOML; what is not TOML is text, so that names need no quotes. Raises `ResoluteError`.
    """
    return dict(_assignments(settings))


def _assignments(settings: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for setting in settings:
        for part in re.split(rf"\s+(?={_KEY}=)", setting.strip()):
            key, equals, value = part.partition("=")
            if not equals or not value.strip() or not re.fullmatch(_KEY, key.strip()):
                raise ResoluteError(
                    f"--set: got {part!r}, expected KEY=VALUE, such as optim.lr=0.1 or stages[0].epochs=3; correct it"
                )
            yield key.strip(), _value(value.strip())


def _value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if {*table} == {"value"} else text


def _assign(table: dict[str, Any], key: str, value: Any) -> None:
    """Set `key`, such as "stages[0].epochs", in the nested `table`; missing tables are added, missing items are not."""
    parts = [int(number) if number else name for name, number in re.findall(r"([A-Za-z_][\w-]*)|\[(\d+)\]", key)]
    inner: Any = table
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        if isinstance(part, int):
            if not isinstance(inner, list) or part >= len(inner):
                count = f"{len(inner)} of them, from 0" if isinstance(inner, list) else "no list"
                raise ResoluteError(f"--set: got {key}, expected an item of the recipe, which has {count}; correct it")
        elif not isinstance(inner, dict):
            raise ResoluteError(f"--set: got {key}, but the recipe has no table before {part!r}; correct the key")
        if after is None:
            known = inner[part] if isinstance(inner, list) else inner.get(part)
            if isinstance(known, dict) and not isinstance(value, dict):
                raise ResoluteError(f"--set: got {key}, which is a table of {', '.join(known)}; name one of its keys")
            inner[part] = value
        elif isinstance(part, int):
            inner = inner[part]
        else:
            inner = inner.setdefault(part, [] if isinstance(after, int) else {})
