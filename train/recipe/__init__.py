"""The recipe: one TOML file with every value that can change a run's results, parsed into frozen dataclasses."""

from pathlib import Path

__all__ = ["RECIPES"]

RECIPES = Path(__file__).resolve().parent.parent / "recipes"  # the included ones, one TOML file each
