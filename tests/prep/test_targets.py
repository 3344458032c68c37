"""Whole runs of prep on tables of labels and values: tars, index, manifest, loader, repair and errors."""

from __future__ import annotations

import csv
import json
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable, Sequence
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
from tests.support.source_formats import pack_samples
from tests.support.trees import tree

Prep = Callable[..., Any]
NAMES = ("bright", "near", "red", "two eyes")
RNG = np.random.default_rng(11)
LABELS = [[name for name in NAMES if RNG.random() < 0.4] for _ in range(60)]
VALUES = np.stack([RNG.normal(40, 20, 60), 10.0 ** RNG.normal(0, 8, 60)], axis=1).astype(np.float32)
DENSE = {"labels": np.array([[name in own for name in NAMES] for own in LABELS], np.float32), "values": VALUES}


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


@pytest.fixture
def names(photos: Path) -> list[str]:
    """The 60 photos, in order of their names."""
    paths = [path for path in photos.rglob("*") if path.suffix in (".jpg", ".JPEG") and path.name[0] != "."]
    return sorted(str(path.relative_to(photos)) for path in paths)


def label_table(path: Path, names: Sequence[str], labels: Sequence[Sequence[str]] = LABELS) -> Path:
    rows = [(name, json.dumps(own[::-1])) for name, own in zip(names, labels, strict=True)]
    return write_table(path, ("image_name", "tags"), rows)


def value_table(path: Path, names: Sequence[str]) -> Path:
    rows = [(name, *map(repr, row.tolist())) for name, row in zip(names, VALUES, strict=False)]
    return write_table(path, ("filename", "age [years]", "mass (kg)"), rows)


TABLES = {"labels": label_table, "values": value_table}


def sources(root: Path, split: str) -> list[str]:
    """Names of the input images of a split, in order of its samples."""
    files = sorted((root / "index").glob(f"{split}*.sources.jsonl"), key=lambda path: ".g" in path.name)
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def check_targets(root: Path, dense: NDArray[np.float32], number_of: Callable[[str], int]) -> ShardSet:
    """Check that each sample has the row of `dense` of its photo, which `number_of` tells from the photo's name."""
    opened = ShardSet.open(root)
    for split, samples in opened.splits.items():
        rows = dense[[number_of(name) for name in sources(root, split)]]
        np.testing.assert_array_equal(opened.target.decode(samples.samples[:]), rows)
    assert sum(map(len, opened.splits.values())) == 60
    return opened


def argv(photos: Path, table: Path, out: Path) -> tuple[object, ...]:
    return ("--src", photos, "--labels", table, "--out", out, "--res", "32", "--shard-samples", 20)


def refused(ran: Any, *words: str) -> None:
    """One line, *where: got X, expected Y; do Z*, that contains `words`."""
    lines = [line for line in ran.err.splitlines()
             if "(TARGET=" not in line and not line.startswith("resolute shards:   ")]  # fmt: skip
    assert (ran.status, ran.out, len(lines)) == (2, "", 1), (ran.out, ran.err)
    assert re.fullmatch(r"resolute shards: .+: .*got .+expected .+; .+", lines[0]), ran.err
    for word in words:
        assert word in ran.err


@pytest.mark.parametrize("kind", ["labels", "values"])
def test_a_table_of_targets_reaches_tars_index_and_loader_unchanged(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep, kind: str
) -> None:
    out, dense = tmp_path / "s", DENSE[kind]
    ran = prep(*argv(photos, TABLES[kind](tmp_path / "t.csv", names), out))
    assert ran.status == 0, ran.err
    assert f"TARGET={kind}" in ran.err
    assert ran.err.count("line ") == 3, "three example rows"
    opened = check_targets(out, dense, names.index)
    assert opened.target.kind == kind
    assert opened.target.names == (NAMES if kind == "labels" else ("age", "mass"))
    assert opened.target.units == (() if kind == "labels" else ("years", "kg"))
    for split in ("train", "val"):
        rows = dense[[names.index(name) for name in sources(out, split)]]
        in_tars = []
        for path in sorted((out / "32").glob(f"{split}-*.tar")):
            with tarfile.open(path) as tar:
                in_tars += [json.load(tar.extractfile(member)) for member in tar.getmembers()[1::2]]  # type: ignore[arg-type]
                assert [Path(name).suffix for name in tar.getnames()[:2]] == [".jpg", ".json"]
        if kind == "labels":
            assert in_tars == [{"labels": np.flatnonzero(row).tolist()} for row in rows]
        else:
            np.testing.assert_array_equal(np.array([row["target"] for row in in_tars]).astype(np.float32), rows)
    with Loader(Plan(opened, [Stage(res=32, epochs=1, batch_size=16)], eval_batch_size=6)) as loader:
        for batch in loader:
            rows = dense[[names.index(sources(out, batch.spec.split)[i]) for i in batch.spec.ids.tolist()]]
            np.testing.assert_array_equal(batch.targets.numpy(), rows)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["labels", "values"])
def test_repair_further_resolutions_and_jobs_give_the_bytes_of_one_run(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep, kind: str
) -> None:
    table = TABLES[kind](tmp_path / "t.csv", names)
    both = (*argv(photos, table, tmp_path / "once"), "--res", "32,48")
    assert prep(*both).status == 0
    once = tree(tmp_path / "once")
    out = tmp_path / "s"
    assert prep(*argv(photos, table, out)).status == 0
    more = (*argv(photos, table, out), "--res", "32,48")
    assert prep(*more).status == 0
    assert tree(out) == once
    damaged = out / "32" / "train-000001.tar"
    with tarfile.open(damaged) as tar:
        offset = tar.getmembers()[3].offset_data
    data = bytearray(damaged.read_bytes())
    data[offset + 12] ^= 1  # a digit of the target
    damaged.write_bytes(data)
    (out / "index" / "val.npy").write_bytes(b"")
    assert verify([out, "--workers", "1"]) == 1
    assert prep(*more).status == 0
    assert tree(out) == once
    jobs = ("--out", tmp_path / "jobs")
    assert main(["plan", *both, *jobs]) == 0
    for part in ("2:", ":2"):
        assert main(["range", *jobs, "--range", part, "--workers", "1"]) == 0
    assert main(["finish", *jobs]) == 0
    assert tree(tmp_path / "jobs") == once


def test_verify_compares_targets_in_tars_with_the_index(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep, capfd: pytest.CaptureFixture[str]
) -> None:
    assert prep(*argv(photos, label_table(tmp_path / "t.csv", names), tmp_path / "s")).status == 0
    tar = tmp_path / "s" / "32" / "train-000000.tar"
    tar.write_bytes(tar.read_bytes().replace(b'{"labels": [0', b'{"labels": [7', 1))
    assert verify([tmp_path / "s", "--workers", "1"]) == 1
    assert "its target has changed" in capfd.readouterr().out


@pytest.mark.slow
def test_a_changed_table_is_a_changed_source(photos: Path, names: list[str], tmp_path: Path, prep: Prep) -> None:
    table = tmp_path / "t.csv"
    words = argv(photos, label_table(table, names), tmp_path / "s")
    assert prep(*words).status == 0
    assert "already there" in prep(*words).out
    other = [own if i != 17 else [*own, "red"] if "red" not in own else [] for i, own in enumerate(LABELS)]
    label_table(table, names, other)
    assert "the source has changed in train red" in prep(*words).err
    value_table(table, names)
    refused(prep(*words), "target kind: got \"labels\", expected \"values\"")
    assert prep(*words, "--rebuild").status == 0
    assert ShardSet.open(tmp_path / "s").target.kind == "values"
    table.write_text(table.read_text().replace(repr(float(VALUES[5, 0])), "1.5"))
    assert "the source has changed in train (values)" in prep(*words).err


def move_into_splits(photos: Path, names: Sequence[str], root: Path) -> None:
    """Photo i becomes iii.jpg in `root`/val, if i is a multiple of 4, or `root`/train."""
    for i, name in enumerate(names):
        folder = root / ("val" if i % 4 == 0 else "train")
        folder.mkdir(exist_ok=True)
        shutil.move(photos / name, folder / f"{i:03d}.jpg")


@pytest.mark.slow
def test_one_table_may_name_the_images_of_src_and_val(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep
) -> None:
    move_into_splits(photos, names, tmp_path)
    both = label_table(tmp_path / "both.csv", [f"{i:03d}" for i in range(60)])
    header, *rows = both.read_text().splitlines(keepends=True)
    own, val = tmp_path / "a.csv", tmp_path / "b.csv"
    own.write_text("".join([header, *(row for i, row in enumerate(rows) if i % 4)]))
    val.write_text("".join([header, *rows[::4]]))
    common = ("--src", tmp_path / "train", "--val", tmp_path / "val", "--res", "32")
    ran = prep(*common, "--labels", both, "--out", tmp_path / "s")
    assert ran.status == 0, ran.err
    assert "ignored: nothing" in ran.out
    opened = check_targets(tmp_path / "s", DENSE["labels"], lambda name: int(name[:3]))
    assert len(opened.splits["val"]) == 15
    assert prep(*common, "--labels", own, "--val-labels", val, "--out", tmp_path / "t").status == 0
    assert tree(tmp_path / "t") == tree(tmp_path / "s")
    refused(prep(*common, "--labels", own, "--out", tmp_path / "u"), "set VAL_LABELS")
    shutil.copy(tmp_path / "val" / "000.jpg", tmp_path / "train")
    refused(prep(*common, "--labels", both, "--out", tmp_path / "u"), "line 2 names two files, got 000")
    assert not list((tmp_path / "u").glob("*"))


def test_a_validation_table_has_a_column_for_each_label_of_training(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep
) -> None:
    move_into_splits(photos, names, tmp_path)

    def run(own: Path, columns: Sequence[str], bits: Callable[[int, str], int]) -> Any:
        rows = [(f"{i:03d}.jpg", *(bits(i, name) for name in columns)) for i in range(0, 60, 4)]
        val = write_table(tmp_path / "b.csv", ("image_id", *columns), rows)
        return prep("--src", tmp_path / "train", "--labels", own, "--val", tmp_path / "val", "--val-labels", val,
                    "--res", "32", "--dry", "--out", tmp_path / "s")  # fmt: skip

    def has(i: int, name: str) -> int:
        return int(name in LABELS[i])

    train = [i for i in range(60) if i % 4]
    rows = [(f"{i:03d}.jpg", *(has(i, name) for name in NAMES)) for i in train]
    own = write_table(tmp_path / "a.csv", ("image_id", *NAMES), rows)
    refused(run(own, ("bright", "red", "two eyes"), has), "that lacks near,", "expected the 4 of SRC's table")
    other = run(own, ("bright", "red", "spiny", "two eyes"), has)
    refused(other, "got a table that lacks near and adds spiny,", "correct VAL_LABELS")
    as_class_numbers = run(own, ("near",), has)
    refused(as_class_numbers, "got a table that lacks bright, red, two eyes,", "correct VAL_LABELS")
    assert run(own, ("red", "bright", "two eyes", "near"), has).status == 0, "the order is free"
    classes = [(f"{i:03d}.jpg", i % 2, 1 - i % 2) for i in train]
    own = write_table(tmp_path / "a.csv", ("image_id", "far", "near"), classes)
    refused(run(own, ("far",), lambda i, name: 1), "that lacks near, expected the 2 of SRC's table")


def samples_of(photos: Path, names: Sequence[str], contents: Sequence[object]) -> list[Any]:
    return [
        (f"{i:03d}.jpg", (photos / name).read_bytes(), {"json": json.dumps(content).encode()})
        for i, (name, content) in enumerate(zip(names, contents, strict=True))
    ]


@pytest.mark.parametrize("form", ["names", "numbers", "list", "number"])
def test_webdataset_json_holds_labels_or_values(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep, form: str
) -> None:
    contents, kind, expected = {
        "names": ([{"labels": own} for own in LABELS], "labels", NAMES),
        "numbers": ([{"labels": np.flatnonzero(row).tolist(), "width": 3} for row in DENSE["labels"]], "labels",
                    ("0", "1", "2", "3")),
        "list": ([{"target": row.tolist()} for row in VALUES], "values", ("target 0", "target 1")),
        "number": ([{"target": float(row[0])} for row in VALUES], "values", ("target",)),
    }[form]  # fmt: skip
    src = pack_samples(tmp_path / "wds.tar", samples_of(photos, names, contents))
    ran = prep("--src", src, "--out", tmp_path / "s", "--res", "32")
    assert ran.status == 0, ran.err
    opened = check_targets(
        tmp_path / "s", DENSE[kind][:, : len(expected)], lambda name: int(name.split("/")[1][:3])
    )
    assert (opened.target.kind, opened.target.names) == (kind, expected)


def test_dalis_webdataset_reader_reads_the_targets(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep
) -> None:
    fn = pytest.importorskip("nvidia.dali.fn")
    pipeline_def = pytest.importorskip("nvidia.dali.pipeline").pipeline_def
    assert prep(*argv(photos, value_table(tmp_path / "t.csv", names), tmp_path / "s"), "--val-frac", 0).status == 0
    paths = sorted(map(str, (tmp_path / "s" / "32").glob("*.tar")))

    @pipeline_def(batch_size=60, num_threads=1, device_id=None)
    def graph() -> Any:
        return fn.readers.webdataset(
            paths=paths, index_paths=[path.replace(".tar", ".idx") for path in paths], ext=["json"],
            missing_component_behavior="error",
        )  # fmt: skip

    pipe = graph()
    pipe.build()
    (contents,) = pipe.run()
    targets = [json.loads(contents.at(i).tobytes())["target"] for i in range(60)]
    rows = VALUES[[names.index(name) for name in sources(tmp_path / "s", "train")]]
    np.testing.assert_array_equal(np.array(targets).astype(np.float32), rows)


def test_our_own_tars_are_a_source_with_the_same_targets(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep
) -> None:
    assert prep(*argv(photos, label_table(tmp_path / "t.csv", names), tmp_path / "s")).status == 0
    (tmp_path / "classes.txt").write_text("\n".join(NAMES))
    src = tmp_path / "s" / "32" / "train-*.tar"
    options = ("--classes", tmp_path / "classes.txt", "--res", "24", "--val-frac", 0)
    ran = prep("--src", src, "--out", tmp_path / "t", *options)
    assert ran.status == 0, ran.err
    first, second = ShardSet.open(tmp_path / "s"), ShardSet.open(tmp_path / "t")
    assert second.target == first.target
    key_of = [int(name.split("/")[1][:9]) for name in sources(tmp_path / "t", "train")]
    samples = first.splits["train"].samples
    by_key = dict(zip(samples["key"].tolist(), samples["labels"], strict=True))
    np.testing.assert_array_equal(second.splits["train"].samples["labels"], [by_key[key] for key in key_of])


@pytest.mark.parametrize("form", ["names", "classes", "floats", "columns", "bits"])
def test_parquet_lists_and_numbers_are_targets(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep, form: str
) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    age, x = (pa.array(VALUES[:, column]) for column in (0, 1))
    numbers = [np.flatnonzero(row).tolist() for row in DENSE["labels"]]
    columns, kind, expected, option = {
        "names": ({"labels": pa.array(LABELS)}, "labels", NAMES, ()),
        "classes": ({"labels": pa.array(numbers, pa.list_(pa.int64()))}, "labels", NAMES, ()),
        "floats": ({"target": pa.array(VALUES.tolist(), pa.list_(pa.float32()))}, "values", ("target 0", "target 1"),
                   ()),
        "columns": ({"age [a]": age, "x": x, "note": pa.array(["?"] * 60)}, "values", ("age", "x"),
                    ("--columns", "image,age [a]..x")),
        "bits": ({name: pa.array([name in own for own in LABELS]) for name in NAMES}, "labels", NAMES,
                 ("--columns", f"image,{NAMES[0]}..{NAMES[-1]}")),
    }[form]  # fmt: skip
    table = pa.table({"image": pa.array([{"bytes": (photos / name).read_bytes()} for name in names]), **columns})
    feature = {"_type": "Sequence", "feature": {"_type": "ClassLabel", "names": list(NAMES)}}
    if form == "classes":
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": {"labels": feature}}})})
    parquet.write_table(table, tmp_path / "p.parquet")
    ran = prep("--src", tmp_path / "p.parquet", "--out", tmp_path / "s", "--res", "32", *option)
    assert ran.status == 0, ran.err
    opened = check_targets(tmp_path / "s", DENSE[kind], lambda name: int(name.split("/")[1]))
    assert opened.target.names == expected


def test_bad_targets_stop_a_run_before_anything_is_written(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep
) -> None:
    table, out = tmp_path / "t.csv", tmp_path / "s"

    def fails(rows: list[Sequence[object]], *words: str, options: Sequence[object] = ()) -> None:
        write_table(table, ("image_id", "tags"), rows)
        refused(prep(*argv(photos, table, out), *options), *words)
        assert not [path for path in out.rglob("*") if path.is_file() and ".prep" not in path.parts]

    rows = [(name, json.dumps(own)) for name, own in zip(names, LABELS, strict=True)]
    (tmp_path / "classes.txt").write_text("bright\nnear\nred\n")
    at = next(i for i, own in enumerate(LABELS) if "two eyes" in own) + 2
    fails(rows, f"such as two eyes in line {at}", "classes.txt", options=("--classes", tmp_path / "classes.txt"))
    all_names = ["red", "near", "bright", "two eyes"]
    shown = f"in line 2 and '{' + '.join(all_names)}' in line 62"
    fails([*rows, (names[0], json.dumps(all_names))], names[0], shown)
    fails([(name, i / 7 if i else "nan") for i, name in enumerate(names)], "t.csv: line 2: got 'nan' in column tags")
    folders = ("--src", photos, "--out", out, "--res", "32")
    refused(prep(*folders, "--target", "labels"), "class folders", "LABELS=table.csv")
    refused(prep(*folders, "--target", "tags"), "TARGET: got 'tags'")
    refused(prep(*argv(photos, table, out), "--val-labels", table), "VAL_LABELS: has no effect", "without VAL")
    contents: list[object] = [{"target": [1.5, 2.0]}] * 60
    for content, words in (
        ({"target": [1.5]}, "got 1 numbers in column target"),
        ({"label": "cat"}, "got 'cat' in column target, in which"),
        ({"target": [1.5, float("nan")]}, "got nan in column"),
    ):
        src = pack_samples(tmp_path / "w.tar", samples_of(photos, names, [*contents[:59], content]))
        refused(prep("--src", src, "--out", out, "--res", "32"), words, "w.tar/059.jpg")


@pytest.mark.parametrize("form", ["table", "list", "json"])
def test_whole_numbers_that_hardly_recur_end_prep_unless_target_is_set(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep, form: str
) -> None:
    scores = [*range(100, 145), *[100, 101, 102] * 5]
    rows = list(zip(names, scores, strict=True))
    src = ("--src", photos, "--labels", write_table(tmp_path / "t.csv", ("id", "label"), rows))
    if form == "list":
        (photos / "t.txt").write_text("".join(f"{name} {n}\n" for name, n in rows))
        src = ("--src", photos / "t.txt")
    if form == "json":
        samples = samples_of(photos, names, [{"label": score} for score in scores])
        src = ("--src", pack_samples(tmp_path / "w.tar", samples))
    words = (*src, "--out", tmp_path / "s", "--res", "32", "--dry")
    refused(prep(*words), "got 45 different ones for 60 photos, 42 of them once", "TARGET=values", "TARGET=class")
    for target, shown in (("values", "1 value"), ("class", "145 classes")):
        assert f"60 images, {shown}" in prep(*words, "--target", target).out
    few = write_table(tmp_path / "few.csv", ("id", "label"), [(name, i % 22) for i, name in enumerate(names)])
    assert prep("--src", photos, "--labels", few, *words[-5:]).status == 0, "2 or 3 photos of each class"


def test_unlabelled_photos_are_left_out_if_told_so(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep
) -> None:
    rows = [(name, -1 if i in (7, 8) else i % 3) for i, name in enumerate(names)]
    words = argv(photos, write_table(tmp_path / "t.csv", ("id", "label"), rows), tmp_path / "s")
    refused(prep(*words), f"t.csv: line 9: {names[7]} is unlabelled, got -1", "UNLABELLED=drop")
    ran = prep(*words, "--unlabelled", "drop")
    assert ran.status == 0, ran.err
    assert "58 images, 3 classes" in ran.out
    assert "2 unlabelled" in ran.out
    assert "--unlabelled=drop" in prep("--out", tmp_path / "s").err, "the command that made the set"


def test_what_a_table_lacks_is_counted(photos: Path, names: list[str], tmp_path: Path, prep: Prep) -> None:
    rows: list[Sequence[object]] = [(name, json.dumps(own)) for name, own in zip(names[:50], LABELS, strict=False)]
    rows += [rows[3], (names[50], "")]
    table = write_table(tmp_path / "t.csv", ("image_id", "tags"), rows)
    (tmp_path / "classes.txt").write_text("\n".join([*NAMES, "unseen"]))
    ran = prep(*argv(photos, table, tmp_path / "s"), "--classes", tmp_path / "classes.txt")
    assert ran.status == 0, ran.err
    assert "1 duplicate names" in ran.out
    assert "9 unlabelled" in ran.out
    assert f"without a label: {1 + sum(not own for own in LABELS[:50])} images" in ran.out
    assert "WARNING: classes without a training image: 1 of 5 (unseen)" in ran.out
    assert "Labels per sample" in (tmp_path / "s" / "report.html").read_text()


def test_duplicates_with_two_targets_are_reported(photos: Path, names: list[str], tmp_path: Path, prep: Prep) -> None:
    shutil.copy(photos / names[1], photos / names[2])
    shutil.copy(photos / names[3], photos / names[4])
    values = [(name, 1.5 if i in (3, 4) else i / 3) for i, name in enumerate(names)]
    table = write_table(tmp_path / "t.csv", ("image_id", "angle [deg]"), values)
    ran = prep(*argv(photos, table, tmp_path / "s"), "--val-frac", 0)
    assert ran.status == 0, ran.err
    assert "WARNING: copies with different targets, one of which is wrong: 1 group" in ran.out
    groups = [json.loads(line) for line in (tmp_path / "s" / "duplicates.jsonl").read_text().splitlines()]
    targets = sorted([entry["target"] for entry in group] for group in groups)
    np.testing.assert_allclose(sorted(np.ravel(targets)), [1 / 3, 2 / 3, 1.5, 1.5], rtol=1e-7)
    assert "angle" in (tmp_path / "s" / "report.html").read_text()


def test_a_dry_run_shows_what_a_table_means(photos: Path, names: list[str], tmp_path: Path, prep: Prep) -> None:
    ran = prep(*argv(photos, value_table(tmp_path / "t.csv", names), tmp_path / "s"), "--dry")
    assert ran.status == 0, ran.err
    assert "2 numbers for each of 60 photos (TARGET=values): 2 columns of numbers" in ran.out
    assert f"line 2: {names[0]}: age {VALUES[0, 0]:.6g} years" in ran.out
    assert "60 images, 2 values (age, mass)" in ran.out
    assert not (tmp_path / "s").exists()


def test_an_extension_keeps_old_values_and_adds_new_ones(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep
) -> None:
    """Of several labels: tests/prep/test_extend.py."""
    table = tmp_path / "t.csv"
    words = argv(photos, value_table(table, names[:40]), tmp_path / "s")
    assert prep(*words).status == 0
    value_table(table, names)
    ran = prep(*words, "--extend")
    assert ran.status == 0, ran.err
    check_targets(tmp_path / "s", VALUES, names.index)
    assert verify([tmp_path / "s", "--workers", "1"]) == 0
    lines = table.read_text().splitlines(keepends=True)
    lines[4] = f"{names[3]},0.5,1\n"
    table.write_text("".join(lines))
    assert "1 changed, kept as they are" in prep(*words, "--extend").out
