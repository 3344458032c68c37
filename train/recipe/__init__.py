"""The recipe: one TOML file with every value that can change a run's results, parsed into frozen dataclasses."""

import re
import textwrap
from pathlib import Path

__all__ = ["RECIPES", "RECIPE_FILE", "included"]

_WIDTH = 80  # of a terminal
RECIPE_FILE = "recipe.toml"  # in the folder of a run: the recipe that it began with
RECIPES = Path(__file__).resolve().parent.parent / "recipes"  # the included ones, one TOML file each


def included() -> str:
    """The included recipes, a line each: the name, and what the file's first sentence says of it, as far as it fits."""
    lines = []
    for path in sorted(RECIPES.glob("*.toml")):
        comments = [line.removeprefix("# ") for line in path.read_text(encoding="utf-8").splitlines()[1:4]]
        about = " ".join(comments).removeprefix("Not run by us. ")
        first, *more = re.split(r"(?=[,:] | \()", about.partition(". ")[0].partition("; ")[0].rstrip("."))
        line = "  " + textwrap.shorten(f"{path.stem}: {first}", _WIDTH - 2, placeholder=" …")
        for clause in more:
            if len(line + clause) > _WIDTH:
                break
            line += clause
        lines.append(line)
    return "\n".join(["Included recipes:", *lines])
