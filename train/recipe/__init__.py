"""The recipe: one TOML file with every value that can change a run's results, parsed into frozen dataclasses."""

from pathlib import Path

__all__ = ["RECIPES", "included"]

RECIPES = Path(__file__).resolve().parent.parent / "recipes"  # the included ones, one TOML file each


def included() -> str:
    """The included recipes, a line each: the name, and the first sentence of the file that says what it trains."""
    lines = []
    for path in sorted(RECIPES.glob("*.toml")):
        comments = [line.removeprefix("# ") for line in path.read_text(encoding="utf-8").splitlines()[1:4]]
        about = " ".join(comments).removeprefix("Not run by us. ")
        lines.append(f"  {path.stem}: {about.partition('. ')[0].partition('; ')[0].rstrip('.')}")
    return "\n".join(["Included recipes:", *lines])
