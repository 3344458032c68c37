"""`resolute recipe --upgrade OLD.toml`: a recipe of an earlier version in the format of this one."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from resolute.errors import ResoluteError
from resolute.files import check_output, output_file

from .recipe.schema import Recipe
from .recipe.text import RecipeText
from .recipe.toml import recipe_text
from .recipe.upgrade import old_key, upgraded

__all__ = ["translate", "translated"]


def translate(old: Path, new: Path | None) -> None:
    """Write the recipe `old`, translated, to `new`, which must not exist; None: in its place.

    In its place, the file FILE.old keeps the text of before. Comments above the first key stay, others do not. Raises
    `ResoluteError`, and leaves all files as they are, for a recipe that cannot be translated.
    """
    text = RecipeText.read(old, any_version=True)
    path, kept = (old, old.with_name(f"{old.name}.old")) if new is None else (new, None)
    for other in (kept or path,):
        if os.path.lexists(other):
            raise ResoluteError(f"{other}: exists already, expected a new file; rename or delete it")
    check_output(path, setting="OUT", suffixes=(".toml",), named=False)
    content = translated(text)
    if kept is not None:
        with output_file(kept) as file:
            file.write(text.toml.encode())
    with output_file(path) as file:
        file.write(content.encode())
    print(f"{path}: translated" + (f"; {kept} is the old text" if kept is not None else ""))


def translated(text: RecipeText) -> str:
    """The TOML text of the recipe in this version's format, with the comments above its first key.

    Raises `ResoluteError` for a recipe of this version, and for what this version does not have.
    """
    table = text.table()
    if old_key(table) is None:
        raise ResoluteError(f"{text.where}: has the format of this version, expected an earlier one; use it as it is")
    Recipe.check_stages(table, where=text.where)
    try:
        new = upgraded(table, exact=True)
    except ResoluteError as error:
        raise ResoluteError(f"{text.where}: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ResoluteError(
            f"{text.where}: not a valid recipe of an earlier version ({reason}); correct it first"
        ) from None
    Recipe.parse(new, name=text.name, where=text.where)
    lines = itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), text.toml.splitlines())
    head = "\n".join(lines).strip()
    return f"{head}\n\n{recipe_text(new).rstrip()}\n".lstrip()
