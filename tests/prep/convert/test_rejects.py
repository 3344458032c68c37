"""Rejected inputs leave a gap in the keys and a reason; with too many of them no manifest is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.prep.sources.reject import NOT_THERE

Prep = Callable[..., Any]


@pytest.fixture
def damaged(photos: Path) -> dict[str, str]:
    """Damage four of the 60 photos and add a broken link: {relative path: how its reason starts}."""
    truncated = photos / "apple" / "01.jpg"
    truncated.write_bytes(truncated.read_bytes()[:900])
    (photos / "bee" / "03.jpg").write_bytes(b"")
    (photos / "bee" / "05.jpg").write_text("<html>404</html>")
    (photos / "cat" / "lost.png").symlink_to(photos / "nowhere.png")
    (photos / "cat" / "loop.jpg").symlink_to("loop.jpg")
    return {
        "apple/01.jpg": "truncated",
        "bee/03.jpg": "empty file",
        "bee/05.jpg": "HTML page: a failed download",
        "cat/lost.png": "not there: no such file",
        "cat/loop.jpg": "unreadable",
    }


def test_too_many_rejects_leave_no_manifest_and_allowed_ones_are_listed_and_leave_gaps_in_the_keys(
    photos: Path, tmp_path: Path, prep: Prep, damaged: dict[str, str]
) -> None:
    out, argv = tmp_path / "s", ("--src", photos, "--res", "32,48", "--shard-samples", 20)
    ran = prep(*argv, "--out", out, "--max-bad", 0)
    assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
    for words in ("too many unusable images", "got 1 of 62", "expected at most 0", "1 not there"):
        assert words in ran.err
    assert not (out / "manifest.json").exists()
    (row,) = map(json.loads, (out / ".prep" / "rejects.jsonl").read_text().splitlines())
    assert (row["path"], row["reason"]) == ("cat/lost.png", NOT_THERE)

    ran = prep(*argv, "--out", out, "--max-bad", 0.1)
    assert ran.status == 0, ran.err
    for word in ("5 (", "1 truncated", "1 empty file", "1 HTML page", "1 not there", "1 unreadable"):
        assert word in ran.out
    rows = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert rows == sorted(rows, key=lambda row: (row["split"], row["key"]))
    assert {row["path"] for row in rows} == set(damaged)
    for row in rows:
        assert row["reason"].startswith(damaged[row["path"]]), row
    for name, split in ShardSet.open(out).splits.items():
        own = {row["key"] for row in rows if row["split"] == name}
        keys = split.samples["key"].tolist()
        assert sorted([*keys, *own]) == list(range(len(keys) + len(own)))
        for res in (32, 48):
            assert np.array_equal(split.stored[res]["shard"], split.samples["key"] // 20)


@pytest.mark.slow
def test_the_limit_of_megapixels_belongs_to_the_set(photos: Path, tmp_path: Path, prep: Prep) -> None:
    Image.new("RGB", (1250, 801)).save(photos / "bee" / "large.jpg")
    out, argv = tmp_path / "s", ("--src", photos, "--res", "32", "--max-bad", 0.1, "--shard-samples", 20)
    assert prep(*argv, "--out", out).status == 0
    assert (out / "rejects.jsonl").read_bytes() == b""
    assert "max_megapixels" not in json.loads((out / "records" / "plan.json").read_text())["settings"]
    limited = (*argv, "--out", out, "--max-megapixels", 1)
    assert "max_megapixels: got null, expected 1" in prep(*limited).err
    assert prep(*limited, "--rebuild").status == 0
    assert json.loads((out / "rejects.jsonl").read_text())["reason"] == "too many pixels: 1250x801"
    assert json.loads((out / "source.json").read_text())["make"]["MAX_MEGAPIXELS"] == "1"


def test_a_shard_that_has_only_rejects_is_not_written(photos: Path, tmp_path: Path, prep: Prep) -> None:
    for path in sorted(photos.rglob("*.JPEG")):
        path.write_bytes(b"junk")
    argv = ("--src", photos, "--out", tmp_path / "s", "--res", "32", "--shard-samples", 1, "--max-bad", 1)
    assert prep(*argv).status == 0
    splits = ShardSet.open(tmp_path / "s").splits.values()
    assert sum(len(split) for split in splits) == 30
    for split in splits:
        assert split.stored[32]["shard"].tolist() == list(range(len(split)))
        assert [*split.shards] == [f"{split.name}-{key:06d}" for key in split.samples["key"]]
    tars = {path.stem for path in (tmp_path / "s" / "32").glob("*.tar")}
    assert tars == {shard for split in splits for shard in split.shards}


def test_a_split_without_any_sample_is_an_error(photos: Path, tmp_path: Path, prep: Prep) -> None:
    (tmp_path / "val.txt").write_text("apple/01.jpg\n")
    (photos / "apple" / "01.jpg").write_bytes(b"junk")
    argv = ("--src", photos, "--out", tmp_path / "s", "--res", "32", "--max-bad", 1)
    ran = prep(*argv, "--val-list", tmp_path / "val.txt")
    assert ran.status == 2
    assert "no image of val is usable" in ran.err
    assert not (tmp_path / "s" / "manifest.json").exists()
