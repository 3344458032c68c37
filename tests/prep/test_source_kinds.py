"""Whole runs of prep from every source format; duplicates, odd names, and the dry run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.prep.convert.batch import EncodeOptions
from resolute.prep.run.pool import Pool
from tests.support.manifests import read_joined
from tests.support.source_formats import files_in, pack_table, pack_tar, pack_zip
from tests.support.trees import tree

Prep = Callable[..., Any]


def contents(photos: Path) -> dict[str, bytes]:
    """{path relative to photos: bytes} of the images."""
    paths = [path for path in photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg") and path.name[0] != "."]
    return {str(path.relative_to(photos)): path.read_bytes() for path in sorted(paths)}


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["zip", *(pytest.param(kind, marks=SLOW) for kind in ("url", "tar", "tar.gz", "list", "table"))]
)
def test_every_kind_of_source_gives_the_set_of_the_folders(
    photos: Path, set_template: Path, tmp_path: Path, prep: Prep, kind: str
) -> None:
    images = contents(photos)
    rows = [(name, name.split("/")[0]) for name in reversed(images)]
    src: Path | str = photos
    more: tuple[object, ...] = ()
    if kind == "url":
        src = f"file://{photos}"
    elif kind == "zip":
        src = pack_zip(tmp_path / "p.zip", files_in(images, "photos/"))
    elif kind == "list":
        src = photos / "list.txt"
        src.write_text("".join(f"{name} {label}\n" for name, label in rows))
    elif kind == "table":
        more = ("--labels", pack_table(tmp_path / "labels.csv", rows))
    else:
        src = pack_tar(tmp_path / f"p.{kind}", files_in(images, "photos/"), kind.partition(".")[2])
    ran = prep("--src", src, *more, "--out", tmp_path / "s", "--res", "32,48", "--shard-samples", 20)
    assert ran.status == 0, ran.err
    assert tree(tmp_path / "s") == tree(set_template)


def test_duplicates_are_kept_counted_and_listed(photos: Path, tmp_path: Path, prep: Prep) -> None:
    shutil.copy(photos / "apple" / "01.jpg", photos / "apple" / "99.jpg")
    shutil.copy(photos / "apple" / "03.jpg", photos / "bee" / "99.jpg")
    (tmp_path / "val.txt").write_text("cat/05.jpg\n")
    shutil.copy(photos / "cat" / "05.jpg", photos / "cat" / "99.jpg")
    words = ("--src", photos, "--out", tmp_path / "s", "--res", "32", "--val-list", tmp_path / "val.txt")
    ran = prep(*words, "--duplicates", "keep")
    assert ran.status == 0, ran.err
    assert "3 exact copies of other images; all are kept" in ran.out
    assert "WARNING: copies with different targets, one of which is wrong: 1 group" in ran.out
    assert "WARNING: 1 file in both train and val, which makes val look too good; " in ran.out
    assert "DUPLICATES=drop REBUILD=1" in ran.out
    duplicates = read_joined(tmp_path / "s")["source"]["duplicates"]
    assert duplicates == {"groups": 3, "extra": 3, "two_labels": 1, "across_splits": 1}
    lines = [json.loads(line) for line in (tmp_path / "s" / "duplicates.jsonl").read_text().splitlines()]
    assert {frozenset(row["path"] for row in rows) for rows in lines} == {
        frozenset({"apple/01.jpg", "apple/99.jpg"}),
        frozenset({"apple/03.jpg", "bee/99.jpg"}),
        frozenset({"cat/05.jpg", "cat/99.jpg"}),
    }
    assert sum(len(split) for split in ShardSet.open(tmp_path / "s").splits.values()) == 63


def test_a_dry_run_counts_and_estimates_and_writes_nothing(
    photos: Path, set_template: Path, tmp_path: Path, prep: Prep
) -> None:
    ran = prep("--src", photos, "--out", tmp_path / "s", "--res", "32,48", "--dry")
    assert ran.status == 0, ran.err
    assert "60 images, 3 classes, train 54, val 6" in ran.out
    assert "nothing was written" in ran.out
    assert not (tmp_path / "s").exists()
    (kilobytes,) = [float(line.split(", ")[-1].split()[0]) for line in ran.out.splitlines() if " 48 px:" in line]
    tars = sum(path.stat().st_size for path in (set_template / "48").glob("*.tar"))
    assert kilobytes == pytest.approx(tars / 60 / 1e3, rel=0.35)  # the end of a tar is up to 10 kB


def test_a_dry_run_converts_as_the_run_does(
    photos: Path, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[EncodeOptions] = []
    real = Pool.run

    def run(self: Pool, options: EncodeOptions, *args: Any, **more: Any) -> Any:
        used.append(options)
        return real(self, options, *args, **more)

    monkeypatch.setattr(Pool, "run", run)
    argv = ("--src", photos, "--out", tmp_path / "s", "--res", "32", "--quality", 71, "--max-megapixels", 9)
    for more in (("--dry",), ()):
        assert prep(*argv, "--grey-range", 12, *more).status == 0
    dry, *own = used
    assert own == [dry] * max(1, len(own))
    assert (dry.quality, dry.max_megapixels, dry.grey_bits) == (71, 9, 12)


def test_image_names_that_are_not_utf8_are_preserved_in_a_set(photos: Path, tmp_path: Path, prep: Prep) -> None:
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
