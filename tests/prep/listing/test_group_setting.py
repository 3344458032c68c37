"""GROUP: photos that belong together stay on one side of the split, of folds, and when photos are added."""

from __future__ import annotations

import csv
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.prep.listing.splits import _hold_out_groups
from resolute.prep.sources.tables.group_column import hint_at_group, parse_group
from tests.support.cli import prep
from tests.support.source_formats import noise_photos as photos

PATIENTS = [f"p{n // 4}" for n in range(48)]  # four photos of each, one after another
LABELS = ["cat" if n % 8 < 4 else "dog" for n in range(48)]
NAMES = [f"{n:03d}.jpg" for n in range(48)]


def table(path: Path, names: Sequence[str], patients: Sequence[str], heads: str = "filename,label,patient_id") -> Path:
    labels = [LABELS[int(Path(name).stem[-3:])] for name in names]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([heads.split(","), *zip(names, labels, patients, strict=True)])
    return path


def made(folder: Path, *words: str) -> int:
    return prep(["--out", folder / "set", "--res", "32", "--workers", "1", *words])


def sides(folder: Path, patients: Sequence[str] = PATIENTS) -> dict[str, set[str]]:
    """{patient: splits with photos}."""
    found: dict[str, set[str]] = {}
    with ShardSet.open(folder / "set") as shards:
        for split in shards.splits:
            for name in shards.photo_names(split):
                found.setdefault(patients[int(Path(name).stem[-3:])], set()).add(split)
    return found


def test_the_photos_of_a_patient_are_on_one_side_by_a_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos(tmp_path / "photos", NAMES)
    labels = table(tmp_path / "l.csv", NAMES, PATIENTS)
    words = ["--src", str(tmp_path / "photos"), "--labels", str(labels), "--val-frac", "0.25"]
    assert made(tmp_path, *words) == 0
    out = capsys.readouterr().err
    assert out.count("column patient_id may say which photos belong together, such as the rows with p0") == 1
    assert "GROUP=patient_id keeps each group on one side of the split, GROUP=none hides this line" in out
    assert any(len(splits) > 1 for splits in sides(tmp_path).values())
    assert made(tmp_path, *words, "--group", "none", "--rebuild") == 0
    assert "may say which photos belong together" not in capsys.readouterr().err
    assert made(tmp_path, *words, "--group", "patient_id", "--rebuild") == 0
    assert "GROUP=patient_id: 12 groups with 48 photos, the largest with 4" in capsys.readouterr().err
    found = sides(tmp_path)
    assert all(len(splits) == 1 for splits in found.values())
    assert sum(splits == {"val"} for splits in found.values()) == 3
    with ShardSet.open(tmp_path / "set") as shards:
        labels_of_val = Counter(shards.splits["val"].samples["label"].tolist())
        assert set(labels_of_val) == {0, 1}
        assert shards.splits["train"].group is not None
        assert not shards.splits["val"].related(shards.splits["train"]).any()
        for fold in range(3):
            folded = shards.with_fold(fold, 3)
            assert not folded.splits["val"].related(folded.splits["train"]).any()
            assert len(folded.splits["val"]) == 12


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pattern", "file", "near_copies", "list", "parquet"])
def test_groups_come_from_names_a_file_a_list_or_parquet(tmp_path: Path, kind: str) -> None:
    names = [f"{label}/{patient}_{name}" for label, patient, name in zip(LABELS, PATIENTS, NAMES, strict=True)]
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        folder = photos(tmp_path / "photos", NAMES)
        data = [(folder / name).read_bytes() for name in NAMES]
        pq.write_table(pa.table({"image": data, "label": LABELS, "patient": PATIENTS}), tmp_path / "a.parquet")
        words = ["--src", str(tmp_path / "a.parquet"), "--columns", "image,label", "--group", "patient"]
    elif kind == "list":
        photos(tmp_path, NAMES)
        labels = table(tmp_path / "l.csv", NAMES, PATIENTS)
        words = ["--src", str(labels), "--columns", "filename,label", "--group", "patient_id"]
    else:
        photos(tmp_path / "photos", names)
        groups = tmp_path / "groups.csv"
        order = (lambda row: row) if kind == "file" else (lambda row: row[::-1])
        heads, rows = ("name", "group"), zip(names, PATIENTS, strict=True)
        groups.write_text("".join(",".join(order(row)) + "\n" for row in (heads, *rows)))
        words = ["--src", str(tmp_path / "photos")]
        words += ["--group", r"/(p\d+)_" if kind == "pattern" else str(groups)]
    assert made(tmp_path, *words, "--val-frac", "0.25") == 0
    found = sides(tmp_path)
    assert len(found) == 12
    assert all(len(splits) == 1 for splits in found.values())
    assert {*map(frozenset, found.values())} == {frozenset({"train"}), frozenset({"val"})}


@pytest.mark.slow
def test_a_group_keeps_its_split_when_photos_are_added_even_if_the_others_are_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    early, late = (
        [name for n, name in enumerate(NAMES) if n % 4 < 2],
        [name for n, name in enumerate(NAMES) if n % 4 > 1],
    )
    folder = photos(tmp_path / "photos", early)
    patients = dict(zip(NAMES, PATIENTS, strict=True))
    labels = table(tmp_path / "l.csv", early, [patients[name] for name in early])
    words = ["--src", str(folder), "--labels", str(labels), "--group", "patient_id", "--val-frac", "0.25"]
    assert made(tmp_path, *words) == 0
    before = sides(tmp_path)
    gone = [name for name in early if patients[name] in ("p0", "p1", "p2", "p3")]
    for name in gone:
        (folder / name).unlink()
    photos(folder, late, 100)
    now = sorted({*early, *late} - {*gone})
    table(labels, now, [patients[name] for name in now])
    assert made(tmp_path, *words, "--extend") == 0
    assert sides(tmp_path) == before
    with ShardSet.open(tmp_path / "set") as shards:
        assert len(shards.splits["train"]) + len(shards.splits["val"]) == 48
        assert not shards.splits["val"].related(shards.splits["train"]).any()
        group = shards.splits["val"].group
        assert group is not None
        assert group.all()
    # a table that moves a photo of the set into a group of the other side
    moved = {**patients, now[-1]: next(name for name, where in before.items() if where != before[patients[now[-1]]])}
    table(labels, now, [moved[name] for name in now])
    capsys.readouterr()
    assert made(tmp_path, *words, "--extend") == 2
    assert "divides groups, got 1 with photos in train and in val" in capsys.readouterr().err


def test_other_groups_are_other_photos_for_a_run_that_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos(tmp_path / "photos", NAMES)
    labels = table(tmp_path / "l.csv", NAMES, PATIENTS)
    words = ["--src", str(tmp_path / "photos"), "--labels", str(labels), "--columns", "filename,label"]
    assert made(tmp_path, *words, "--group", "patient_id") == 0
    assert made(tmp_path, *words, "--group", "patient_id") == 0
    assert "nothing to do" in capsys.readouterr().out
    table(labels, NAMES, [f"q{n // 2}" for n in range(48)])
    assert made(tmp_path, *words, "--group", "patient_id") == 2
    assert "REBUILD=1" in capsys.readouterr().err
    assert made(tmp_path, *words) == 2
    assert "group" in capsys.readouterr().err


def test_copies_and_groups_stay_together(tmp_path: Path) -> None:
    photos(tmp_path / "photos", NAMES)
    for first, second in ((0, 4), (8, 16)):  # the same file under two patients
        (tmp_path / "photos" / NAMES[second]).write_bytes((tmp_path / "photos" / NAMES[first]).read_bytes())
    labels = table(tmp_path / "l.csv", NAMES, PATIENTS)
    words = ["--src", str(tmp_path / "photos"), "--labels", str(labels), "--columns", "filename,label"]
    assert made(tmp_path, *words, "--group", "patient_id", "--val-frac", "0.3") == 0
    found = sides(tmp_path)
    assert found["p0"] == found["p1"]
    assert found["p2"] == found["p4"]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("nope", "has no column nope, got filename, label, patient_id, expected it; correct GROUP"),
        ("(a", "is no regular expression"),
        ("(a)(b)", "with 2 groups, expected one"),
        (r"^x(\d)", "does not match, got '000.jpg', expected a name in which it finds a group"),
        ("missing.csv", "missing.csv"),
        ("wrong.csv", "got the columns photo, patient, expected name and group in its first line"),
        ("zeros.csv", r"48 of 48 names are no photos, got '0.jpg', expected '000.jpg' (difference: leading zeros)"),
        ("other.csv", "names no photo, got 'x.png'"),
        ("twice.csv", "in a second group, 'b' and 'a', expected one group for each photo"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], group: str, message: str
) -> None:
    photos(tmp_path / "photos", NAMES)
    labels = table(tmp_path / "l.csv", NAMES, PATIENTS)
    (tmp_path / "wrong.csv").write_text("photo,patient\n000.jpg,a\n")
    (tmp_path / "zeros.csv").write_text("name,group\n" + "".join(f"{n}.jpg,a\n" for n in range(48)))
    (tmp_path / "other.csv").write_text("name,group\nx.png,a\n")
    (tmp_path / "twice.csv").write_text("name,group\n000.jpg,a\n000.jpg,b\n")
    words = ["--src", str(tmp_path / "photos"), "--labels", str(labels), "--columns", "filename,label"]
    assert made(tmp_path, *words, "--group", str(tmp_path / group) if group.endswith(".csv") else group) == 2
    assert message in capsys.readouterr().err


def test_a_column_needs_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos(tmp_path / "photos", [f"{label}/{name}" for label, name in zip(LABELS, NAMES, strict=True)])
    assert made(tmp_path, "--src", str(tmp_path / "photos"), "--group", "patient_id") == 2
    assert "the name of a column, for " in capsys.readouterr().err


def test_a_class_of_one_group_stays_in_train_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos(tmp_path / "photos", NAMES)
    only = [f"p{n // 4}" if LABELS[n] == "cat" else "dogs" for n in range(48)]
    labels = table(tmp_path / "l.csv", NAMES, only)
    words = ["--src", str(tmp_path / "photos"), "--labels", str(labels), "--columns", "filename,label"]
    assert made(tmp_path, *words, "--group", "patient_id") == 0
    out = capsys.readouterr().out
    assert "classes without a validation photo: 1 of 2 (dog), since the photos of a group stay together" in out
    assert made(tmp_path, *words, "--group", "label", "--rebuild") == 2
    assert "no image left for val" in (err := capsys.readouterr().err)
    assert "since the photos of a group stay together" in err
    assert made(tmp_path, *words, "--group", "filename", "--rebuild") == 0
    assert "GROUP=filename: no two of 48 photos have the same" in capsys.readouterr().err


def test_a_split_that_divides_groups_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos(tmp_path / "photos", NAMES)
    labels = table(tmp_path / "l.csv", NAMES, PATIENTS)
    (tmp_path / "val.txt").write_text("000.jpg\n004.jpg\n")
    words = ["--src", str(tmp_path / "photos"), "--labels", str(labels), "--columns", "filename,label"]
    assert made(tmp_path, *words, "--group", "patient_id", "--val-list", str(tmp_path / "val.txt")) == 2
    assert "divides groups, got 2 with photos in train and in val, such as 'p0'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "cells", "is_group"),
    [
        ("patient_id", ["a", "a", "b"], True),
        ("PatientID", ["a", "a", "b"], True),
        ("lesion-id", ["a", "a", "b"], True),
        ("video", [3, 3, 4], True),
        ("session_no", [3, 3, None], False),
        ("patient_id", ["a", "b", "c"], False),
        ("patient_age", ["40", "40", "50"], False),
        ("colour", ["a", "a", "b"], False),
        ("group", ["a"] * 5, False),
    ],
)
def test_columns_that_are_named(name: str, cells: list[object], is_group: bool) -> None:
    assert (hint_at_group("t.csv", name, cells) is not None) == is_group


def test_settings_of_groups() -> None:
    assert parse_group(None) is parse_group("none") is None
    assert parse_group("a/b.csv").file == "a/b.csv"  # type: ignore[union-attr]
    assert parse_group(" id ").column == "id"  # type: ignore[union-attr]
    with pytest.raises(ResoluteError, match="GROUP"):
        parse_group("(")


class _Photos:
    """100 000 photos of 20 000 groups and 100 classes."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.groups = rng.integers(20_000, size=100_000)
        self.labels = (self.groups % 100).astype(np.uint32)

    def strata(self) -> NDArray[np.uint32]:
        return self.labels

    def ties(self, seed: int) -> NDArray[np.uint64]:
        return np.arange(100_000, dtype=np.uint64)


def test_many_groups_are_divided_in_seconds() -> None:
    made_up = _Photos()
    start = time.perf_counter()
    held_out = _hold_out_groups(made_up, made_up.groups, 0.1, 0)  # type: ignore[arg-type]
    assert time.perf_counter() - start < 20  # it takes half a second; machines differ
    shares = np.bincount(made_up.labels[held_out], minlength=100) / np.bincount(made_up.labels)
    assert np.abs(shares - 0.1).max() < 0.005
