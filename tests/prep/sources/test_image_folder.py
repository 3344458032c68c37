"""What goes into a set, from a folder of photos as users have them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.dataset.shard_set import ShardSet
from pipeline.errors import ResoluteError
from prep.config import Settings
from prep.plan.inputs import Inputs, list_inputs

Prep = Callable[..., Any]


def inputs(photos: Path, **changes: Any) -> Inputs:
    scratch = photos.parent / "scratch"
    settings = Settings(src=str(photos), out=str(photos.parent / "s"), resolutions=(32,), **changes)
    return list_inputs(settings, scratch, scratch / "spool")


def test_hidden_and_other_files_are_counted_and_ignored(photos: Path) -> None:
    (photos / ".cache").mkdir()
    (photos / ".cache" / "a.jpg").write_bytes(b"x")
    (photos / "empty class").mkdir()
    (photos / "loose.jpg").write_bytes(b"x")
    found = inputs(photos)
    assert found.classes == ("apple", "bee", "cat")
    assert found.images == 60
    assert found.ignored.total() >= 5  # notes.txt, .hidden.jpg, readme.md, .cache, loose.jpg


def test_linked_folders_are_followed_but_not_for_ever(photos: Path, tmp_path: Path) -> None:
    (photos / "cat").rename(tmp_path / "elsewhere")
    (photos / "cat").symlink_to(tmp_path / "elsewhere")
    (photos / "bee" / "loop").symlink_to(photos / "bee")
    found = inputs(photos)
    assert found.classes == ("apple", "bee", "cat")
    assert found.images == 60


def test_what_is_told_of_a_source_changes_with_what_matters(photos: Path) -> None:
    def told(**changes: Any) -> str:
        return json.dumps(inputs(photos, **changes).summary(), sort_keys=True)

    before = told()
    os.utime(photos / "bee" / "03.jpg", (0, 0))
    (photos / "bee" / "notes.txt").write_text("no image")
    assert told() == before
    changed = {before}
    with (photos / "bee" / "03.jpg").open("ab") as file:
        file.write(b"!")
    changed.add(told())
    (photos / "bee" / "03.jpg").rename(photos / "bee" / "003.jpg")
    changed.add(told())
    changed.add(told(val_frac=0.4))
    changed.add(told(folds=3))
    assert len(changed) == 5


def test_folders_that_cannot_be_listed_are_told(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(path: Path) -> Any:
        if Path(path).name == "bee":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ResoluteError, match=r"bee: storage is unavailable, got 'Permission denied'"):
        inputs(photos)


def test_names_that_are_no_text_come_through(photos: Path, tmp_path: Path, prep: Prep) -> None:
    raw = os.fsencode(photos / "bee") + b"/b\xff\n\xe4.jpg"
    (photos / "bee" / "03.jpg").rename(os.fsdecode(raw))
    (photos / "cat").rename(photos / "c\u00e4t 猫")
    ran = prep("--src", photos, "--out", tmp_path / "s", "--res", "32", "--val-frac", "0.5")
    assert ran.status == 0, ran.err
    assert ShardSet.open(tmp_path / "s").classes == ("apple", "bee", "c\u00e4t 猫")
    paths = [
        json.loads(line)
        for name in ("train", "val")
        for line in (tmp_path / "s" / "index" / f"{name}.sources.jsonl").read_text().splitlines()
    ]
    assert len(paths) == 60
    assert raw in {os.fsencode(photos / path) for path in paths}
