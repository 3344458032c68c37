"""A folder in which the commands of the pages run as they are: photos, tables, recipes and a set, all tiny.

Starter recipes and measurements are short (tests/support/quick.py).
Recipes have the names of those that are included, so that commands need no change; their contents are one small recipe.
"""

from __future__ import annotations

import csv
import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests import ROOT
from tests.conftest import make_photos
from tests.support.commands import Command
from tests.support.fake_make import Make

__all__ = ["Sandbox"]

RECIPE = """
model.name = "test_resnet"
optim.lr = 0.05
precision.amp = "off"
eval.batch_size = 16
stages = [{ res = 32, epochs = 1, batch_size = 8 }, { res = 48, epochs = 1, batch_size = 8 }]
"""


class Sandbox:
    """`run(command)` runs a command of a page in the folder: what `make` would start, `resolute` or `python -m`."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        folder.mkdir()
        self.folder, self._scratch = folder, scratch
        self._make = Make(folder)
        for recipe in (ROOT / "train" / "recipes").glob("*.toml"):
            (folder / "train" / "recipes").mkdir(parents=True, exist_ok=True)
            (folder / "train" / "recipes" / recipe.name).write_text(RECIPE)
        for name in ("base.toml", "my.toml"):
            (folder / name).write_text(RECIPE)

    def run(self, command: str) -> None:
        """Run a command to its end. Raises `AssertionError` with its output if it fails."""
        words = shlex.split(command)
        if words[0] == "make":
            for call in self._make.calls(*words[1:]):
                self._python(call, command)
            (self.folder / "calls").unlink()
        else:
            is_resolute = words[0] == "resolute"
            assert is_resolute or words[:2] == ["python", "-m"], f"{command}: add it to LEFT_OUT"
            self._python(["-m", *words] if is_resolute else words[1:], command)

    def _python(self, words: Sequence[str], command: str) -> None:
        assert words[0] == "-m", command
        module = "tests.support.quick" if words[1] == "resolute" else words[1]
        ended = Command(module, words[2:], folder=self.folder, scratch=self._scratch).end(seconds=600)
        assert ended.status == 0, f"{command}\n{ended.out}\n{ended.err}"

    # ---- what the pages expect in the folder -------------------------------------------------------------------------

    def add_demo(self) -> None:
        """Demo photos, fewer than `make train` generates: its batches of 64 need 86 to train on."""
        make_photos(self.folder / "demo" / "photos", classes=2, each=50)
        (self.folder / "demo" / "photos" / ".demo.json").write_text(json.dumps({}))

    def add_photos(self) -> None:
        """Class folders to train and validate on, photos without a class, and the sample of a submission for these."""
        make_photos(self.folder / "photos" / "train", each=15)
        for path in sorted((self.folder / "photos" / "train").glob("*/01[2-4].jpg")):  # why not made: equal photos
            own = self.folder / "photos" / "val" / path.parent.name / path.name
            own.parent.mkdir(parents=True, exist_ok=True)
            path.rename(own)
        new = shutil.copytree(self.folder / "photos" / "val" / "class0", self.folder / "photos" / "new")
        ids = "".join(f"{path.stem},\n" for path in sorted(new.iterdir()))
        (self.folder / "sample_submission.csv").write_text(f"id,label\n{ids}")

    def add_set(self) -> None:
        """The set `shards`, with a validation split."""
        make_photos(self.folder / "set-photos", each=12)
        self.run("resolute shards --src set-photos --out shards --res 128,160,224 --val-frac 0.25")

    def add_growing_photos(self) -> None:
        """A set of class folders, to which photos have come since, and of which one is gone."""
        make_photos(self.folder / "photos", each=12)
        self.run("resolute shards --src photos --out shards --res 128,160")
        for label in range(3):
            folder = self.folder / "photos" / f"class{label}"
            shutil.copy(folder / "000.jpg", folder / "later.jpg")
            with (folder / "later.jpg").open("ab") as file:
                file.write(b"another length")
        (self.folder / "photos" / "class0" / "005.jpg").unlink()

    def add_tables(self) -> None:
        """Flat folders, each with a table of labels as the page about sources shows it."""
        tags = ["clear", "primary", "haze", "road", "water"]
        rng = np.random.default_rng(0)
        chosen = [[tag for tag in tags if rng.random() < 0.5] or tags[:1] for _ in range(40)]
        flags = [[int(tag in row) for tag in tags] for row in chosen]
        tables: dict[str, tuple[str, list[str], list[list[Any]]]] = {
            "dogs": ("labels", ["id", "breed"], [[f"dog{i % 3}"] for i in range(40)]),
            "planet": ("planet", ["image_name", "tags"], [[" ".join(row)] for row in chosen]),
            "plants": ("plants", ["image_id", "healthy", "rust", "scab"], [row[:3] for row in flags]),
            "pets": ("pets", ["Id", "Subject", "Pawpularity"], [[i % 2, 20 + i] for i in range(40)]),
            "xray": (
                "xray",
                ["Path", "Sex", "No Finding", "Edema", "Support Devices"],
                [
                    ["F" if i % 2 else "M", row[0], -1 if i % 5 == 0 else row[1], row[2] or ""]
                    for i, row in enumerate(flags)
                ],
            ),
        }
        photos = sorted(make_photos(self.folder / "flat", classes=1, each=40).rglob("*.jpg"))
        for name, (table, heads, rows) in tables.items():
            (self.folder / name).mkdir()
            for number, photo in enumerate(photos):
                shutil.copy(photo, self.folder / name / f"{name}_{number}.jpg")
            with (self.folder / f"{table}.csv").open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(heads)
                writer.writerows([f"{name}_{number}", *row] for number, row in enumerate(rows))
