"""Which files count as images, and of which class."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ResoluteError
from pipeline.shards import ShardSet
from prep.settings import Settings
from prep.sources import find_sources

Prep = Callable[..., Any]


def settings(photos: Path, **changes: Any) -> Settings:
    return Settings(src=photos, out=photos.parent / "s", resolutions=(32,), **changes)


def test_hidden_and_other_files_are_counted_and_ignored(photos: Path) -> None:
    (photos / ".cache").mkdir()
    (photos / ".cache" / "a.jpg").write_bytes(b"x")
    (photos / "empty class").mkdir()
    (photos / "loose.jpg").write_bytes(b"x")
    sources = find_sources(settings(photos))
    assert sources.classes == ("apple", "bee", "cat")
    assert sources.count == 60
    assert sources.ignored == 5  # notes.txt, .hidden.jpg, readme.md, .cache/a.jpg, loose.jpg


def test_linked_folders_are_followed_but_not_for_ever(photos: Path, tmp_path: Path) -> None:
    (photos / "cat").rename(tmp_path / "elsewhere")
    (photos / "cat").symlink_to(tmp_path / "elsewhere")
    (photos / "bee" / "loop").symlink_to(photos / "bee")
    sources = find_sources(settings(photos))
    assert sources.classes == ("apple", "bee", "cat")
    assert sources.count == 60


def test_fingerprint_tells_what_matters(photos: Path) -> None:
    before = find_sources(settings(photos)).fingerprint()
    os.utime(photos / "bee" / "03.jpg", (0, 0))
    (photos / "bee" / "notes.txt").write_text("no image")
    assert find_sources(settings(photos)).fingerprint() == before
    changed = {before}
    with (photos / "bee" / "03.jpg").open("ab") as file:
        file.write(b"!")
    changed.add(find_sources(settings(photos)).fingerprint())
    (photos / "bee" / "03.jpg").rename(photos / "bee" / "003.jpg")
    changed.add(find_sources(settings(photos)).fingerprint())
    changed.add(find_sources(settings(photos, val_frac=0.4)).fingerprint())
    assert len(changed) == 4


def test_a_new_class_leaves_the_others_held_out_part_alone(photos: Path) -> None:
    def held_out() -> set[str]:
        return {photo.path for photo in find_sources(settings(photos)).splits["val"].photos}

    before = held_out()
    (photos / "ant").mkdir()
    for i in range(5):
        (photos / "ant" / f"{i}.jpg").write_bytes(b"x")
    assert {path for path in held_out() if not path.startswith("ant/")} == before


def test_folders_that_cannot_be_listed_are_told(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(path: Path) -> Any:
        if Path(path).name == "bee":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ResoluteError, match=r"bee: cannot be listed, got Permission denied"):
        find_sources(settings(photos))


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
