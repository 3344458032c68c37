"""Whole runs of prep on tables of labels and values: tars, index, manifest, loader, repair and errors."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from tests.support.cli import prep as main
from tests.support.cli import verify
from tests.support.refusals import refused
from tests.support.source_formats import pack_samples
from tests.support.trees import tree

NAMES = ("bright", "near", "red", "two eyes")
RNG = np.random.default_rng(11)
LABELS = [[name for name in NAMES if RNG.random() < 0.4] for _ in range(60)]
VALUES = np.stack([RNG.normal(40, 20, 60), 10.0 ** RNG.normal(0, 8, 60)], axis=1).astype(np.float32)
DENSE = {"labels": np.array([[name in own for name in NAMES] for own in LABELS], np.float32), "values": VALUES}


@dataclass(frozen=True)
class Case:
    """Photos, a table of their targets at `table`, and the set that prep makes of them at `out`."""

    photos: Path
    names: list[str]  # of the 60 photos, ascending
    folder: Path
    prep: Callable[..., Any]

    @property
    def table(self) -> Path:
        return self.folder / "t.csv"

    @property
    def out(self) -> Path:
        return self.folder / "s"

    @property
    def words(self) -> tuple[object, ...]:
        return ("--src", self.photos, "--labels", self.table, "--out", self.out, "--res", "32", "--shard-samples", 20)

    def run(self, *more: object) -> Any:
        return self.prep(*self.words, *more)

    def made(self, *more: object) -> ShardSet:
        ran = self.run(*more)
        assert ran.status == 0, ran.err
        return ShardSet.open(self.out)

    def made_of(self, src: Path, *more: object) -> ShardSet:
        """The set of another source, without the table."""
        ran = self.prep("--src", src, "--out", self.out, "--res", "32", *more)
        assert ran.status == 0, ran.err
        return ShardSet.open(self.out)

    def write(self, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        write_table(self.table, header, rows)

    def write_labels(self, labels: Sequence[Sequence[str]] = LABELS) -> None:
        rows = zip(self.names, [json.dumps(own[::-1]) for own in labels], strict=False)
        self.write(("image_name", "tags"), rows)

    def write_values(self, count: int = 60) -> None:
        rows = [(name, *map(repr, row.tolist())) for name, row in zip(self.names, VALUES, strict=True)]
        self.write(("filename", "age [years]", "mass (kg)"), rows[:count])

    def samples(self, contents: Iterable[object]) -> Path:
        """WebDataset samples with these contents of their .json."""
        samples = [
            (f"{i:03d}.jpg", (self.photos / name).read_bytes(), {"json": json.dumps(content).encode()})
            for i, (name, content) in enumerate(zip(self.names, contents, strict=True))
        ]
        return pack_samples(self.folder / "w.tar", samples)

    def move_into_splits(self) -> tuple[Path, Path]:
        """Photo i becomes iii.jpg in the folder val, if i is a multiple of 4, or train; returns train and val."""
        train, val = self.folder / "train", self.folder / "val"
        for folder in (train, val):
            folder.mkdir()
        for i, name in enumerate(self.names):
            shutil.move(self.photos / name, (train if i % 4 else val) / f"{i:03d}.jpg")
        return train, val


@pytest.fixture
def case(photos: Path, tmp_path: Path, prep: Callable[..., Any]) -> Case:
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("[0-9]*.*"))
    return Case(photos, names, tmp_path, prep)


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def sources(shards: ShardSet, split: str) -> list[str]:
    """Names of the input images of a split, in order of its samples."""
    files = sorted(Path(shards.root, "index").glob(f"{split}*.sources.jsonl"), key=lambda path: ".g" in path.name)
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def check_targets(shards: ShardSet, dense: NDArray[np.float32], number_of: Callable[[str], int]) -> None:
    """Check that each sample has the row of `dense` of its photo, which `number_of` tells from the photo's name."""
    for split, samples in shards.splits.items():
        rows = dense[[number_of(name) for name in sources(shards, split)]]
        np.testing.assert_array_equal(shards.target.decode(samples.samples[:]), rows)
    assert sum(map(len, shards.splits.values())) == 60


STATES = np.random.default_rng(5).choice([1.0, 0.0, -1.0, np.nan], (60, len(NAMES)), p=[0.3, 0.3, 0.2, 0.2])
CELLS = {1.0: "1.0", 0.0: "0.0", -1.0: "-1.0"}  # else blank


def uncertain_rows(case: Case) -> list[Sequence[object]]:
    return [(name, *(CELLS.get(x, "") for x in row)) for name, row in zip(case.names, STATES.tolist(), strict=True)]


def test_ignored_labels_reach_tars_index_and_loader(case: Case) -> None:
    case.write(("Path", *NAMES), uncertain_rows(case))
    refused(case.run(), "blank cells (first: line ", "BLANK=0", "UNCERTAIN=ignore")
    opened = case.made("--blank", "0", "--uncertain", "ignore")
    dense = np.nan_to_num(STATES).astype(np.float32)
    check_targets(opened, dense, case.names.index)
    in_tars = []
    for path in sorted((case.out / "32").glob("train-*.tar")):
        with tarfile.open(path) as tar:
            in_tars += [json.load(tar.extractfile(member)) for member in tar.getmembers()[1::2]]  # type: ignore[arg-type]
    rows = dense[[case.names.index(name) for name in sources(opened, "train")]]
    lists = [(np.flatnonzero(row == 1).tolist(), np.flatnonzero(row == -1).tolist()) for row in rows]
    assert in_tars == [{"labels": present, "ignored": ignored} for present, ignored in lists]
    with Loader(Plan(opened, [Stage(res=32, epochs=1, batch_size=16)], eval_batch_size=6)) as loader:
        for batch in loader:
            listed = sources(opened, batch.spec.split)
            rows = dense[[case.names.index(listed[i]) for i in batch.spec.ids.tolist()]]
            np.testing.assert_array_equal(batch.targets.numpy(), rows)
    assert verify([case.out, "--workers", "1"]) == 0
    assert "already there" in case.run("--blank", "0", "--uncertain", "ignore").out
    refused(case.run("--blank", "0", "--uncertain", "0"), "target ignored: got true, expected null")


def test_photos_with_blank_cells_are_left_out_and_counted(case: Case) -> None:
    case.write(("Path", *NAMES), uncertain_rows(case))
    ran = case.run("--blank", "drop", "--uncertain", "1")
    whole = ~np.isnan(STATES).any(1)
    assert f"{(~whole).sum()} photos with blank cells left out (BLANK=drop)" in ran.err
    assert f"{(~whole).sum()} unlabelled" in ran.out
    opened = ShardSet.open(case.out)
    assert sum(map(len, opened.splits.values())) == whole.sum()
    assert not opened.target.ignored
    for split, samples in opened.splits.items():
        rows = STATES[[case.names.index(name) for name in sources(opened, split)]]
        np.testing.assert_array_equal(opened.target.decode(samples.samples[:]), np.abs(rows))


@pytest.mark.slow
def test_a_set_with_ignored_labels_is_extended_and_made_by_jobs(case: Case) -> None:
    settings = ("--blank", "0", "--uncertain", "ignore")
    rows = uncertain_rows(case)
    case.write(("Path", *NAMES), rows[:40])
    case.made(*settings)
    first = {name: data for name, data in tree(case.out / "32").items() if name.endswith(".tar")}
    case.write(("Path", *NAMES, *(f"more {i}" for i in range(6))), [(*row, *["-1", 1, 0, 0, 1, ""]) for row in rows])
    case.made(*settings, "--extend")
    opened = ShardSet.open(case.out)
    assert first.items() <= tree(case.out / "32").items()
    for split, samples in opened.splits.items():
        numbers = [case.names.index(name) for name in sources(opened, split)]
        dense = np.zeros((60, 10), np.float32)
        dense[:, :4] = np.nan_to_num(STATES)
        dense[40:, 4:] = [-1, 1, 0, 0, 1, 0]
        np.testing.assert_array_equal(opened.target.decode(samples.samples[:]), dense[numbers])
    assert verify([case.out, "--workers", "1"]) == 0
    jobs, once = case.folder / "jobs", case.folder / "once"
    case.write(("Path", *NAMES), rows)
    assert case.run(*settings, "--out", once).status == 0
    assert main(["plan", *case.words, *settings, "--out", jobs]) == 0
    for part in ("2:", ":2"):
        assert main(["range", "--out", jobs, "--range", part, "--workers", "1"]) == 0
    assert main(["finish", "--out", jobs]) == 0
    assert tree(jobs) == tree(once)


def test_a_set_with_ignored_labels_is_no_source_of_samples(case: Case) -> None:
    samples = case.samples([{"labels": own, "ignored": ["red"] if i == 7 else []} for i, own in enumerate(LABELS)])
    ran = case.prep("--src", samples, "--out", case.out, "--res", "32")
    refused(ran, "a sample's JSON: got {'labels': ", "expected no ignored labels", "UNCERTAIN=ignore")


def test_blank_and_uncertain_of_class_folders_are_refused(case: Case) -> None:
    for setting in ("blank", "uncertain"):
        ran = case.prep("--src", case.photos, "--out", case.out, "--res", "32", f"--{setting}", "0")
        refused(ran, f"{setting.upper()}: has no effect for KIND=folders")


@pytest.mark.parametrize("kind", ["labels", "values"])
def test_a_table_of_targets_reaches_tars_index_and_loader_unchanged(case: Case, kind: str) -> None:
    dense = DENSE[kind]
    if kind == "labels":
        case.write_labels()
    else:
        case.write_values()
    ran = case.run()
    assert f"TARGET={kind}" in ran.err
    assert ran.err.count("line ") == 3, "three example rows"
    opened = ShardSet.open(case.out)
    check_targets(opened, dense, case.names.index)
    names, units = (NAMES, ()) if kind == "labels" else (("age", "mass"), ("years", "kg"))
    assert (opened.target.kind, opened.target.names, opened.target.units) == (kind, names, units)
    in_tars = []
    for path in sorted((case.out / "32").glob("train-*.tar")):
        with tarfile.open(path) as tar:
            assert [Path(name).suffix for name in tar.getnames()[:4]] == [".jpg", ".json"] * 2
            in_tars += [json.load(tar.extractfile(member)) for member in tar.getmembers()[1::2]]  # type: ignore[arg-type]
    rows = dense[[case.names.index(name) for name in sources(opened, "train")]]
    if kind == "labels":
        assert in_tars == [{"labels": np.flatnonzero(row).tolist()} for row in rows]
    else:
        np.testing.assert_array_equal(np.array([row["target"] for row in in_tars]).astype(np.float32), rows)
    with Loader(Plan(opened, [Stage(res=32, epochs=1, batch_size=16)], eval_batch_size=6)) as loader:
        for batch in loader:
            listed = sources(opened, batch.spec.split)
            rows = dense[[case.names.index(listed[i]) for i in batch.spec.ids.tolist()]]
            np.testing.assert_array_equal(batch.targets.numpy(), rows)


@pytest.mark.slow
def test_repair_further_resolutions_and_jobs_give_the_bytes_of_one_run(case: Case) -> None:
    case.write_values()
    once, jobs = case.folder / "once", case.folder / "jobs"
    assert case.run("--res", "32,48", "--out", once).status == 0
    case.made()
    case.made("--res", "32,48")
    assert tree(case.out) == tree(once)
    damaged = case.out / "32" / "train-000001.tar"
    with tarfile.open(damaged) as tar:
        offset = tar.getmembers()[3].offset_data
    data = bytearray(damaged.read_bytes())
    data[offset + 12] ^= 1  # a digit of the target
    damaged.write_bytes(data)
    (case.out / "index" / "val.npy").write_bytes(b"")
    assert verify([case.out, "--workers", "1"]) == 1
    case.made("--res", "32,48")
    assert tree(case.out) == tree(once)
    assert main(["plan", *case.words, "--res", "32,48", "--out", jobs]) == 0
    for part in ("2:", ":2"):
        assert main(["range", "--out", jobs, "--range", part, "--workers", "1"]) == 0
    assert main(["finish", "--out", jobs]) == 0
    assert tree(jobs) == tree(once)


@pytest.mark.slow
def test_a_changed_table_is_a_changed_source(case: Case) -> None:
    case.write_labels()
    case.made()
    assert "already there" in case.run().out
    case.write_labels([own if i != 17 else [*own, "red"] if "red" not in own else [] for i, own in enumerate(LABELS)])
    assert "the source has changed in train red" in case.run().err
    case.write_values()
    refused(case.run(), 'target kind: got "labels", expected "values"')
    assert case.made("--rebuild").target.kind == "values"
    case.table.write_text(case.table.read_text().replace(repr(float(VALUES[5, 0])), "1.5"))
    assert "the source has changed in train (values)" in case.run().err


@pytest.mark.slow
def test_one_table_may_name_the_images_of_src_and_val(case: Case) -> None:
    train, val = case.move_into_splits()
    rows = [(f"{i:03d}", json.dumps(own[::-1])) for i, own in enumerate(LABELS)]
    case.write(("id", "tags"), rows)
    own = write_table(case.folder / "a.csv", ("id", "tags"), [row for i, row in enumerate(rows) if i % 4])
    of_val = write_table(case.folder / "b.csv", ("id", "tags"), rows[::4])
    both = ("--src", train, "--val", val)
    ran = case.run(*both)
    assert "ignored: nothing" in ran.out, ran.err
    opened = ShardSet.open(case.out)
    check_targets(opened, DENSE["labels"], lambda name: int(name[:3]))
    assert len(opened.splits["val"]) == 15
    case.made(*both, "--labels", own, "--val-labels", of_val, "--out", case.folder / "t")
    assert tree(case.folder / "t") == tree(case.out)
    refused(case.run(*both, "--labels", own, "--out", case.folder / "u"), "set VAL_LABELS")
    assert not list((case.folder / "u").glob("*"))


def test_a_validation_table_has_a_column_for_each_label_of_training(case: Case) -> None:
    train, val = case.move_into_splits()

    def has(i: int, name: str) -> int:
        return int(name in LABELS[i])

    def run(columns: Sequence[str]) -> Any:
        rows = [(f"{i:03d}.jpg", *(has(i, name) for name in columns)) for i in range(0, 60, 4)]
        own = write_table(case.folder / "b.csv", ("image_id", *columns), rows)
        return case.run("--src", train, "--val", val, "--val-labels", own, "--dry")

    numbers = [i for i in range(60) if i % 4]
    case.write(("image_id", *NAMES), [(f"{i:03d}.jpg", *(has(i, name) for name in NAMES)) for i in numbers])
    refused(run(("bright", "red", "two eyes")), "got a table that lacks near,", "expected the 4 of SRC's table")
    other = run(("bright", "red", "spiny", "two eyes"))
    refused(other, "got a table that lacks near and adds spiny,", "correct VAL_LABELS")
    assert run(("red", "bright", "two eyes", "near")).status == 0, "the order is free"


@pytest.mark.parametrize("kind", ["labels", "values"])
def test_webdataset_json_holds_labels_or_values(case: Case, kind: str) -> None:
    contents: list[object] = [{"labels": own, "width": 3} for own in LABELS]
    expected: tuple[str, ...] = NAMES
    if kind == "values":
        contents, expected = [{"target": row.tolist()} for row in VALUES], ("target 0", "target 1")
    opened = case.made_of(case.samples(contents))
    check_targets(opened, DENSE[kind], lambda name: int(name.split("/")[1][:3]))
    assert (opened.target.kind, opened.target.names) == (kind, expected)


@pytest.mark.parametrize("form", ["lists of classes", "columns of values", "columns of bits"])
def test_parquet_lists_and_columns_are_targets(case: Case, form: str) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    expected: tuple[str, ...] = NAMES
    option: tuple[str, ...] = ("--columns", f"image,{NAMES[0]}..{NAMES[-1]}")
    if form == "lists of classes":
        lists = [np.flatnonzero(row).tolist() for row in DENSE["labels"]]
        columns, option = {"labels": pa.array(lists, pa.list_(pa.int64()))}, ()
    elif form == "columns of bits":
        columns = {name: pa.array([name in own for own in LABELS]) for name in NAMES}
    else:
        columns = {"age [a]": pa.array(VALUES[:, 0]), "x": pa.array(VALUES[:, 1]), "note": pa.array(["?"] * 60)}
        expected, option = ("age", "x"), ("--columns", "image,age [a]..x")
    images = pa.array([{"bytes": (case.photos / name).read_bytes()} for name in case.names])
    table = pa.table({"image": images, **columns})
    if form == "lists of classes":
        feature = {"_type": "Sequence", "feature": {"_type": "ClassLabel", "names": list(NAMES)}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": {"labels": feature}}})})
    parquet.write_table(table, case.folder / "p.parquet")
    opened = case.made_of(case.folder / "p.parquet", *option)
    check_targets(opened, DENSE["values" if "values" in form else "labels"], lambda name: int(name.split("/")[1]))
    assert opened.target.names == expected


def test_bad_targets_stop_a_run_before_anything_is_written(case: Case) -> None:
    case.write_labels()
    (case.folder / "classes.txt").write_text("bright\nnear\nred\n")
    at = next(i for i, own in enumerate(LABELS) if "two eyes" in own) + 2
    other_classes = case.run("--classes", case.folder / "classes.txt")
    refused(other_classes, f"such as two eyes in line {at}", "classes.txt")
    with case.table.open("a") as file:
        file.write(f'{case.names[0]},"[""red"", ""near"", ""bright"", ""two eyes""]"\n')
    refused(case.run(), case.names[0], "in line 2 and 'red + near + bright + two eyes' in line 62")
    case.write(("id", "tags"), [(name, i / 7 if i else "nan") for i, name in enumerate(case.names)])
    refused(case.run(), "t.csv: line 2: ", "is unlabelled", "UNLABELLED=drop")
    case.write(("id", "tags"), [(name, "red near" if i else "") for i, name in enumerate(case.names)])
    are_tags = "if cells such as 'red near' are several labels, and a photo may have none, set TARGET=labels:space"
    refused(case.run(), "line 2: ", "is unlabelled", "UNLABELLED=drop", are_tags)
    case.write(("id", "tags"), [(name, "red near" if i else "none") for i, name in enumerate(case.names)])
    err = case.run().err
    assert "line 2: " in err
    assert "has the label 'none', expected a class" in err
    assert are_tags in err
    case.write(("id", "tags"), [(name, "red" if i else "") for i, name in enumerate(case.names)])
    refused(case.run(), "line 2: ", "is unlabelled")
    assert "TARGET" not in case.run().err
    folders = ("--src", case.photos, "--out", case.out, "--res", "32")
    refused(case.prep(*folders, "--target", "labels"), "class folders", "LABELS=table.csv")
    src = case.samples([*[{"target": [1.5, 2.0]}] * 59, {"target": [1.5]}])
    refused(case.prep(*folders, "--src", src), "got 1 numbers in column target", "w.tar/059.jpg")
    assert not [path for path in case.out.rglob("*") if path.is_file() and ".prep" not in path.parts]


def test_whole_numbers_that_hardly_recur_end_prep_unless_target_is_set(case: Case) -> None:
    case.write(("id", "label"), zip(case.names, [*range(100, 145), *[100, 101, 102] * 5], strict=True))
    refused(
        case.run("--dry"), "got 45 different labels for 60 photos, 42 of them once", "TARGET=values", "TARGET=class"
    )
    for target, shown in (("values", "1 value"), ("class", "145 classes")):
        assert f"60 images, {shown}" in case.run("--dry", "--target", target).out
    case.write(("id", "label"), [(name, i % 22) for i, name in enumerate(case.names)])
    assert case.run("--dry").status == 0, "2 or 3 photos of each class"


def test_what_a_table_lacks_is_counted(case: Case) -> None:
    rows: list[Sequence[object]] = [(name, json.dumps(own)) for name, own in zip(case.names[:50], LABELS, strict=False)]
    case.write(("image_id", "tags"), [*rows, rows[3], (case.names[50], "")])
    (case.folder / "classes.txt").write_text("\n".join([*NAMES, "unseen"]))
    ran = case.run("--classes", case.folder / "classes.txt")
    assert ran.status == 0, ran.err
    assert "1 duplicate names" in ran.out
    assert "9 unlabelled" in ran.out
    assert f"without a label: {1 + sum(not own for own in LABELS[:50])} images" in ran.out
    assert "WARNING: classes without a training image: 1 of 5 (unseen)" in ran.out
    assert "Labels per sample" in (case.out / "report.html").read_text()


def test_a_parquet_row_of_blank_cells_keeps_its_own_photo(case: Case) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    images = pa.array([{"bytes": (case.photos / name).read_bytes()} for name in case.names])
    bits = [[None if i % 5 == 0 else float(i % 3 == j) for i in range(60)] for j in range(2)]
    parquet.write_table(pa.table({"image": images, "a": bits[0], "b": bits[1]}), case.folder / "p.parquet")
    options = ("--columns", "image,a,b", "--target", "labels")
    left_out = case.made_of(case.folder / "p.parquet", *options, "--unlabelled", "drop")
    assert sum(map(len, left_out.splits.values())) == 48
    opened = case.made_of(case.folder / "p.parquet", *options, "--blank", "0", "--rebuild")
    assert sum(map(len, opened.splits.values())) == 60
    for split, samples in opened.splits.items():
        digests = np.load(Path(opened.root, "index", f"{split}.source.npy"))["digest"].tolist()
        numbers = [int(name.split("/")[1]) for name in sources(opened, split)]
        read = [hashlib.sha256((case.photos / case.names[n]).read_bytes()).digest()[:8] for n in numbers]
        assert digests == [int.from_bytes(digest, "little") for digest in read]
        dense = np.array([[bits[j][n] or 0.0 for j in range(2)] for n in numbers])
        np.testing.assert_array_equal(opened.target.decode(samples.samples[:]), dense)
