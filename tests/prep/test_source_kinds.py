"""Whole runs of prep from every source format; nothing held out, fixed classes, duplicates, and the dry run."""

from __future__ import annotations

import csv
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.prep.listing.database import Database
from resolute.prep.listing.inputs import list_sources, split_inputs
from resolute.prep.settings import Settings
from tests.support.source_formats import files_in, pack_parquet, pack_tar, pack_zip
from tests.support.trees import tree

Prep = Callable[..., Any]


def contents(photos: Path) -> dict[str, bytes]:
    """{path relative to photos: bytes} of the images."""
    paths = [path for path in photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg") and path.name[0] != "."]
    return {str(path.relative_to(photos)): path.read_bytes() for path in sorted(paths)}


def test_folders_zip_tar_list_and_url_give_the_same_set(photos: Path, tmp_path: Path, prep: Prep) -> None:
    argv = ("--res", "32,48", "--shard-samples", 20)
    images = contents(photos)
    sources: dict[str, Path | str] = {
        "folders": photos,
        "url": f"file://{photos}",
        "zip": pack_zip(tmp_path / "p.zip", files_in(images, "photos/")),
        "tar": pack_tar(tmp_path / "p.tar", files_in(images, "photos/")),
        "tar.gz": pack_tar(tmp_path / "p.tar.gz", files_in(images, "photos/"), "gz"),
    }
    (photos / "list.txt").write_text("".join(f"{name} {name.split('/')[0]}\n" for name in reversed(images)))
    sources["list"] = photos / "list.txt"
    trees = {}
    for name, src in sources.items():
        ran = prep("--src", src, "--out", tmp_path / f"s-{name}", *argv)
        assert ran.status == 0, ran.err
        trees[name] = tree(tmp_path / f"s-{name}")
        assert trees[name] == trees["folders"], name


def test_a_table_determines_the_labels(photos: Path, tmp_path: Path, prep: Prep) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("id", "breed"))
        for n, (name, data) in enumerate(contents(photos).items()):
            (flat / f"{n:03d}.jpg").write_bytes(data)
            rows.writerow((f"{n:03d}", name.split("/")[0]))
    ran = prep("--src", flat, "--labels", tmp_path / "labels.csv", "--out", tmp_path / "s", "--res", "32")
    assert ran.status == 0, ran.err
    opened = ShardSet.open(tmp_path / "s")
    assert opened.classes == ("apple", "bee", "cat")
    assert np.bincount(opened.splits["train"].samples["label"]).tolist() == [18, 18, 18]


def test_a_resumed_run_does_not_unpack_parquet_again(
    photos: Path, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["apple", "bee", "cat"]
    rows = [(data, name, names.index(name.split("/")[0])) for name, data in contents(photos).items()]
    rows[7] = (b"junk", *rows[7][1:])
    pack_parquet(tmp_path / "train-00000-of-00001.parquet", rows, names)
    argv = ("--src", tmp_path / "train-00000-of-00001.parquet", "--out", tmp_path / "s", "--res", "32")
    ran = prep(*argv)
    assert (ran.status, "too many unusable" in ran.err) == (2, True), ran.err
    assert list((tmp_path / "s" / ".prep" / "spool").rglob("*.blob"))

    def unpack(*args: object) -> None:
        raise AssertionError("unpacked again")

    monkeypatch.setattr("resolute.prep.sources.parquet._fill", unpack)
    ran = prep(*argv, "--max-bad", 0.1)
    assert ran.status == 0, ran.err
    assert not (tmp_path / "s" / ".prep").exists()
    assert ShardSet.open(tmp_path / "s").classes == ("apple", "bee", "cat")


def test_a_set_that_holds_out_nothing_has_the_same_folds_in_any_layout(
    photos: Path, tmp_path: Path, prep: Prep
) -> None:
    folds = []
    for samples in (20, 50):
        out = tmp_path / str(samples)
        ran = prep("--src", photos, "--out", out, "--res", "32", "--val-frac", 0, "--shard-samples", samples)
        assert ran.status == 0, ran.err
        shards = ShardSet.open(out)
        assert list(shards.splits) == ["train"]
        assert shards.splits["train"].samples["key"].tolist() == list(range(60))
        folds.append([shards.with_fold(fold, 3).splits["val"].samples["key"].tolist() for fold in range(3)])
    assert folds[0] == folds[1]
    assert [len(keys) for keys in folds[0]] == [20, 20, 20]


def test_a_file_fixes_the_classes_and_their_order(photos: Path, tmp_path: Path, prep: Prep) -> None:
    (tmp_path / "classes.txt").write_text("cat\nzebra\nbee\napple\n")
    argv = ("--src", photos, "--res", "32", "--classes", tmp_path / "classes.txt")
    assert prep(*argv, "--out", tmp_path / "s").status == 0
    opened = ShardSet.open(tmp_path / "s")
    assert opened.classes == ("cat", "zebra", "bee", "apple")
    assert np.bincount(opened.splits["train"].samples["label"]).tolist() == [18, 0, 18, 18]
    (tmp_path / "classes.txt").write_text("cat\nbee\n")
    ran = prep(*argv, "--out", tmp_path / "t")
    assert ran.status == 2
    assert "apple" in ran.err
    assert "classes.txt" in ran.err


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
    duplicates = json.loads((tmp_path / "s" / "manifest.json").read_text())["source"]["duplicates"]
    assert duplicates == {"groups": 3, "extra": 3, "two_labels": 1, "across_splits": 1}
    lines = [json.loads(line) for line in (tmp_path / "s" / "duplicates.jsonl").read_text().splitlines()]
    assert {frozenset(row["path"] for row in rows) for rows in lines} == {
        frozenset({"apple/01.jpg", "apple/99.jpg"}),
        frozenset({"apple/03.jpg", "bee/99.jpg"}),
        frozenset({"cat/05.jpg", "cat/99.jpg"}),
    }
    assert sum(len(split) for split in ShardSet.open(tmp_path / "s").splits.values()) == 63


def test_a_dry_run_counts_and_estimates_and_writes_nothing(photos: Path, tmp_path: Path, prep: Prep) -> None:
    argv = ("--src", photos, "--out", tmp_path / "s", "--res", "32,48")
    ran = prep(*argv, "--dry")
    assert ran.status == 0, ran.err
    assert "60 images, 3 classes, train 54, val 6" in ran.out
    assert "nothing was written" in ran.out
    assert not (tmp_path / "s").exists()
    (kilobytes,) = [float(line.split(", ")[-1].split()[0]) for line in ran.out.splitlines() if " 48 px:" in line]
    assert prep(*argv).status == 0
    tars = sum(path.stat().st_size for path in (tmp_path / "s" / "48").glob("*.tar"))
    assert kilobytes == pytest.approx(tars / 60 / 1e3, rel=0.35)  # the end of a tar is up to 10 kB


def test_the_summary_of_the_inputs_changes_with_content_names_and_splits_only(photos: Path) -> None:
    def summary(**changes: Any) -> str:
        settings = Settings(src=str(photos), out=str(photos.parent / "s"), res=(32,), **changes)
        database = Database(Path(tempfile.mkdtemp(dir=photos.parent)))
        inputs = split_inputs(settings, *list_sources(settings, database, photos.parent / "spool"))
        return json.dumps(inputs.summary(), sort_keys=True)

    before = summary()
    os.utime(photos / "bee" / "03.jpg", (0, 0))
    (photos / "bee" / "notes.txt").write_text("no image")
    assert summary() == before
    changed = {before}
    with (photos / "bee" / "03.jpg").open("ab") as file:
        file.write(b"!")
    changed.add(summary())
    (photos / "bee" / "03.jpg").rename(photos / "bee" / "003.jpg")
    changed.add(summary())
    changed.add(summary(val_frac=0.4))
    changed.add(summary(val_frac=0.0))
    assert len(changed) == 5


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
