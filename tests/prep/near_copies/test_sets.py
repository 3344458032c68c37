"""Near copies in a set: its files and counts, resumed, extended, with placeholders, in folds, and switched off."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.prep.near_copies.descriptor import HASHES
from resolute.prep.shard_set import manifest as manifests
from resolute.prep.shard_set.groups import group_rows
from resolute.prep.shard_set.record import ShardRecord, pack_rows, unpack_rows
from tests.support.cli import verify
from tests.support.manifests import read_joined
from tests.support.trees import tree

from .conftest import COPIES, drawn

Prep = Callable[..., Any]
SIZES = ("--res", "64,96", "--shard-samples", 20)


class Stopped(Exception):
    """As if the run had been killed."""


def save(image: Image.Image, path: Path) -> str:
    """Save as a JPEG; returns the name in the source."""
    image.save(path, quality=90)
    return f"{path.parent.name}/{path.name}"


def opened(path: Path) -> Image.Image:
    return Image.open(path).convert("RGB")


def split_of(out: Path) -> dict[str, str]:
    """{name: split}"""
    return {
        json.loads(line): split
        for split in ("train", "val")
        for path in out.glob(f"index/{split}*.sources.jsonl")
        for line in path.read_text().splitlines()
    }


def groups(out: Path, mark: str = "") -> list[set[str]]:
    """The names in each group of the table."""
    found: dict[str, set[str]] = {}
    for row in csv.DictReader(io.StringIO((out / f"near_copies{mark}.csv").read_text())):
        assert split_of(out)[row["name"]] == row["split"]
        assert 0 <= float(row["distance"]) <= 0.05
        found.setdefault(row["group"], set()).add(row["name"])
    assert list(found) == [str(number) for number in range(1, len(found) + 1)]
    return list(found.values())


def counts(out: Path, generation: int = -1) -> dict[str, int]:
    own: dict[str, int] = read_joined(out)["generations"][generation]["near_copies"]
    return own


@pytest.fixture
def planted(drawings: Path) -> list[set[str]]:
    """Three groups among the drawings, one of them of three photos, and one of two classes."""
    ant, bat = drawings / "ant", drawings / "bat"
    return [
        {"ant/000.jpg", save(COPIES["mirrored"](opened(ant / "000.jpg")), ant / "copy0.jpg")},
        {
            "bat/001.jpg",
            save(COPIES["half size"](opened(bat / "001.jpg")), bat / "copy1.jpg"),
            save(COPIES["brighter"](opened(bat / "001.jpg")), bat / "copy2.jpg"),
        },
        {"ant/002.jpg", save(COPIES["cropped by 5 %"](opened(ant / "002.jpg")), bat / "copy3.jpg")},
    ]


def test_groups_are_listed_told_and_kept_together(
    drawings: Path, planted: list[set[str]], tmp_path: Path, prep: Prep
) -> None:
    out = tmp_path / "s"
    (tmp_path / "val.txt").write_text("ant/000.jpg\nbat/001.jpg\nbat/003.jpg\n")
    ran = prep("--src", drawings, "--out", out, *SIZES, "--val-list", tmp_path / "val.txt")
    assert ran.status == 0, ran.err
    assert sorted(map(sorted, groups(out))) == sorted(map(sorted, planted))
    found = counts(out)
    assert (found["photos"], found["across_splits"], found["two_labels"]) == (7, 2, 1)
    table = re.escape(str(out / "near_copies.csv"))
    across = "2 of 3 validation photos show the same picture or the same moment as a training photo"
    assert re.search(rf"{across}; a run reports .* GROUP={table} VAL_FRAC=0.1 REBUILD=1 .* holds out a part", ran.out)
    assert re.search(r"1 pair of photos with .* different labels, such as .*ant/002.jpg \(ant\)", ran.out), ran.out
    page = (out / "report.html").read_text()
    assert "Near copies" in page
    assert "bat/copy3.jpg" in page
    lines = [json.loads(line) for line in (out / "near_copies.jsonl").read_text().splitlines()]
    assert len(lines) == found["pairs"] + found["warned"]
    assert all(set(photo) == {"path", "split", "key", "label"} for line in lines for photo in line["photos"])
    assert verify([out, "--workers", "1"]) == 0

    shards = ShardSet.open(out)
    train, val = shards.splits["train"], shards.splits["val"]
    assert train.near is not None
    assert val.near is not None
    sizes = np.bincount(np.concatenate([train.near, val.near]))
    assert sorted(sizes[1:].tolist()) == [2, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("is_given", [False, True], ids=["drawn", "given"])
def test_what_the_warning_says_puts_each_group_on_one_side(
    drawings: Path, planted: list[set[str]], tmp_path: Path, prep: Prep, is_given: bool
) -> None:
    out = tmp_path / "s"
    (tmp_path / "val.txt").write_text("ant/000.jpg\nbat/001.jpg\nbat/003.jpg\n")
    given = ("--val-list", tmp_path / "val.txt") if is_given else ("--val-frac", 0.4)
    ran = prep("--src", drawings, "--out", out, *SIZES, *given)
    assert ran.status == 0, ran.err
    assert counts(out)["across_splits"] > 0
    words = re.search(r"GROUP=(\S+)( VAL_FRAC=0\.1| puts)", ran.out)
    assert words is not None
    assert (words[2] == " puts") == (not is_given)
    again = ("--val-frac", 0.1) if is_given else given
    ran = prep("--src", drawings, "--out", out, *SIZES, *again, "--group", words[1], "--rebuild")
    assert ran.status == 0, ran.err
    assert counts(out)["across_splits"] == 0
    assert sorted(map(sorted, groups(out))) == sorted(map(sorted, planted))


def test_folds_keep_near_copies_together(drawings: Path, planted: list[set[str]], tmp_path: Path, prep: Prep) -> None:
    out = tmp_path / "s"
    assert prep("--src", drawings, "--out", out, *SIZES, "--val-frac", 0).status == 0
    whole = ShardSet.open(out)
    near = whole.splits["train"].near
    assert near is not None
    keys = whole.splits["train"].samples["key"]
    fold_of = {
        int(key): fold for fold in range(3) for key in whole.with_fold(fold, 3).splits["val"].samples["key"].tolist()
    }
    for number in range(1, int(near.max()) + 1):
        assert len({fold_of[int(key)] for key in keys[near == number]}) == 1
    assert sorted(fold_of) == sorted(keys.tolist())


@pytest.mark.slow
def test_a_killed_run_gives_the_same_bytes(
    drawings: Path, planted: list[set[str]], tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("--src", drawings, *SIZES)
    assert prep(*argv, "--out", tmp_path / "whole", "--workers", 1).status == 0
    for at in ("rejects_name", "write_card"):
        with monkeypatch.context() as patch:

            def stop(*_: object) -> None:
                raise Stopped

            patch.setattr(manifests, at, stop)
            with pytest.raises(Stopped):
                prep(*argv, "--out", tmp_path / "s")
    # as if a record had been written at the smaller resolution alone
    (tmp_path / "s" / "records" / "train-000001-96.rec").unlink()
    (tmp_path / "s" / "records" / "train-000000-64.rec").unlink()
    assert prep(*argv, "--out", tmp_path / "s").status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "whole")


@pytest.mark.slow
def test_another_resolution_and_a_repair_change_no_group(
    drawings: Path, planted: list[set[str]], tmp_path: Path, prep: Prep
) -> None:
    out = tmp_path / "s"
    assert prep("--src", drawings, "--out", out, *SIZES).status == 0
    names = ("near_copies.csv", "near_copies.jsonl", "index/groups.npy")
    before, found = {name: (out / name).read_bytes() for name in names}, counts(out)
    (out / "near_copies.csv").unlink()
    (out / "64" / "train-000000.tar").unlink()
    assert prep("--src", drawings, "--out", out, *SIZES).status == 0
    assert {name: (out / name).read_bytes() for name in names} == before
    for _ in range(2):
        ran = prep("--src", drawings, "--out", out, "--res", "48,64,96", "--shard-samples", 20)
        assert ran.status == 0, ran.err
        assert {name: (out / name).read_bytes() for name in names} == before
        assert counts(out) == found
        (out / "48" / "train-000000.tar").unlink()


@pytest.mark.slow
def test_an_extension_finds_copies_of_older_photos(drawings: Path, tmp_path: Path, prep: Prep) -> None:
    out = tmp_path / "s"
    (tmp_path / "val.txt").write_text("ant/000.jpg\nbat/001.jpg\n")
    argv = ("--src", drawings, "--out", out, *SIZES, "--val-list", tmp_path / "val.txt")
    assert prep(*argv).status == 0
    assert not (out / "near_copies.csv").exists()
    assert counts(out)["pairs"] == 0
    before = tree(out)
    copy = save(COPIES["cropped by 10 %"](opened(drawings / "ant" / "000.jpg")), drawings / "ant" / "later.jpg")
    save(drawn(500, 120, 90), drawings / "bat" / "later.jpg")
    ran = prep(*argv, "--extend")
    assert ran.status == 0, ran.err
    assert "1 of 2 validation photos shows the same picture or the same moment as a training photo" in ran.out
    assert groups(out, ".g001") == [{"ant/000.jpg", copy}]
    assert (counts(out, 0)["photos"], counts(out, 1)["photos"]) == (0, 2)
    described = ("manifest.json", "_info.json", "README.md")
    assert {name: own for name, own in before.items() if Path(name).name not in described}.items() <= tree(out).items()
    assert ShardSet.open(out).splits["val"].near is not None
    assert verify([out, "--workers", "1"]) == 0


def test_placeholders_neither_explode_nor_vanish(drawings: Path, tmp_path: Path, prep: Prep) -> None:
    """Copies of one picture with other bytes but equal pixels, with other pixels, and with equal bytes."""
    placeholder = drawn(900, 120, 90)
    placeholder.save(drawings / "ant" / "p000.png")
    for number in range(1, 120):
        path = drawings / ("ant", "bat")[number % 2] / f"p{number:03d}.png"
        if number % 3 == 0:
            shutil.copy(drawings / "ant" / "p000.png", path)
        else:
            placeholder.save(path, compress_level=number % 9, dpi=(number, number))
    out = tmp_path / "s"
    ran = prep("--src", drawings, "--out", out, *SIZES, "--val-frac", 0)
    assert ran.status == 0, ran.err
    assert [len(group) for group in groups(out)] == [120]
    assert counts(out)["pairs"] < 120, "not each with each"


def test_nothing_is_looked_for_or_stored_on_demand(
    drawings: Path, planted: list[set[str]], tmp_path: Path, prep: Prep
) -> None:
    out = tmp_path / "s"
    ran = prep("--src", drawings, "--out", out, *SIZES, "--near-copies", "none")
    assert ran.status == 0, ran.err
    assert "same moment" not in ran.out
    assert not list(out.glob("near_copies*"))
    own = read_joined(out)
    assert "near_copies" not in own["generations"][0]
    assert own["settings"]["near_copies"] == "none"
    records = [ShardRecord.parse(path.read_bytes()) for path in out.glob("records/*.rec")]
    assert all(record.hashes is None for record in records)
    assert "near_copies" in prep("--src", drawings, "--out", out, *SIZES).err, "another set"


def test_records_hold_hashes_at_the_smallest_resolution_and_older_ones_none(
    drawings: Path, planted: list[set[str]], tmp_path: Path, prep: Prep
) -> None:
    out = tmp_path / "s"
    assert prep("--src", drawings, "--out", out, *SIZES).status == 0
    for path in sorted(out.glob("records/*.rec")):
        record = ShardRecord.parse(path.read_bytes())
        assert (record.hashes is not None) == path.name.endswith("-64.rec")
        if record.hashes is not None:
            assert record.hashes.shape == (len(record.samples), HASHES)
            assert record.to_bytes() == path.read_bytes()
            header, rows = unpack_rows(path.read_bytes())
            del header["hashes"]
            older = ShardRecord.parse(pack_rows(header, rows[: len(rows) - record.hashes.nbytes]))
            assert older.hashes is None
            assert (older.contents_sha256, older.stored.tolist()) == (record.contents_sha256, record.stored.tolist())
            path.write_bytes(older.to_bytes())
    (out / "manifest.json").unlink()  # as an older version left it before its end
    ran = prep("--src", drawings, "--out", out, *SIZES)
    assert ran.status == 0, ran.err
    assert counts(out)["undescribed"] == 67 - 3
    assert "were not looked for among 64 photos that an older version converted" in ran.out


def test_rows_of_both_kinds_of_groups() -> None:
    keys = np.array([3, 5, 9], np.uint64)
    near = {"train": (keys, np.array([0, 2, 0])), "val": (keys[:1], np.array([2]))}
    groups = {"train": (keys, np.array([7, 0, 0]))}
    assert group_rows(near, groups).tolist() == [(0, 3, 7, 0), (0, 5, 0, 2), (1, 3, 0, 2)]
    assert group_rows(near).tolist() == [(0, 5, 0, 2), (1, 3, 0, 2)]
    assert len(group_rows({})) == 0
