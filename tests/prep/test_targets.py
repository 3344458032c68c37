"""Whole runs of prep on tables of labels and values: tars, index, manifest, loader, repair and errors."""

from __future__ import annotations

import csv
import gc
import io
import json
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

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


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def image_names(photos: Path) -> list[str]:
    """The 60 photos of the fixture, in order of their names."""
    paths = [path for path in photos.rglob("*") if path.suffix in (".jpg", ".JPEG") and path.name[0] != "."]
    return sorted(str(path.relative_to(photos)) for path in paths)


@pytest.fixture
def names(photos: Path) -> list[str]:
    return image_names(photos)


def label_table(path: Path, names: Sequence[str], labels: Sequence[Sequence[str]] = LABELS) -> Path:
    rows = [(name, json.dumps(own[::-1])) for name, own in zip(names, labels, strict=True)]
    return write_table(path, ("image_name", "tags"), rows)


def value_table(path: Path, names: Sequence[str]) -> Path:
    rows = [(name, *map(repr, row.tolist())) for name, row in zip(names, VALUES, strict=True)]
    return write_table(path, ("filename", "age [years]", "mass (kg)"), rows)


def sources(root: Path, split: str) -> list[str]:
    """Names of the input images of a split, in order of its samples."""
    return [json.loads(line) for line in (root / "index" / f"{split}.sources.jsonl").read_text().splitlines()]


def tables(tmp_path: Path, names: Sequence[str]) -> dict[str, tuple[Path, np.ndarray]]:
    """{kind: (table, (60, C or D) float32 targets in order of the names)}"""
    dense = np.array([[name in own for name in NAMES] for own in LABELS], np.float32)
    return {
        "labels": (label_table(tmp_path / "labels.csv", names), dense),
        "values": (value_table(tmp_path / "values.csv", names), VALUES),
    }


@pytest.mark.parametrize("kind", ["labels", "values"])
def test_a_table_of_targets_reaches_tars_index_and_loader_unchanged(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep, kind: str
) -> None:
    table, dense = tables(tmp_path, names)[kind]
    ran = prep("--src", photos, "--labels", table, "--out", tmp_path / "s", "--res", "32,48", "--shard-samples", 20)
    assert ran.status == 0, ran.err
    assert f"TARGET={kind}" in ran.err
    assert ran.err.count("line ") == 3, "three example rows"
    opened = ShardSet.open(tmp_path / "s")
    assert opened.target.kind == kind
    assert opened.target.names == (NAMES if kind == "labels" else ("age", "mass"))
    assert opened.target.units == (() if kind == "labels" else ("years", "kg"))
    seen = 0
    for split in ("train", "val"):
        own = dense[[names.index(name) for name in sources(tmp_path / "s", split)]]
        np.testing.assert_array_equal(opened.target.decode(opened.splits[split].samples[:]), own)
        in_tars = []
        for path in sorted((tmp_path / "s" / "48").glob(f"{split}-*.tar")):
            with tarfile.open(path) as tar:
                members = tar.getnames()
                assert [Path(name).suffix for name in members] == [".jpg", ".json"] * (len(members) // 2)
                for name in members[1::2]:
                    content = tar.extractfile(name)
                    assert content is not None
                    in_tars.append(json.load(content))
        if kind == "labels":
            assert in_tars == [{"labels": np.flatnonzero(row).tolist()} for row in own]
        else:
            np.testing.assert_array_equal(np.array([row["target"] for row in in_tars]).astype(np.float32), own)
        seen += len(own)
    assert seen == 60
    with Loader(Plan(opened, [Stage(res=32, epochs=1, batch_size=16)], eval_batch_size=6)) as loader:
        for batch in loader:
            rows = dense[[names.index(sources(tmp_path / "s", batch.spec.split)[i]) for i in batch.spec.ids.tolist()]]
            np.testing.assert_array_equal(batch.targets.numpy(), rows)


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
def test_repair_further_resolutions_and_jobs_give_the_bytes_of_one_run(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep, kind: str
) -> None:
    table = tables(tmp_path, names)[kind][0]
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
    assert verify([str(out), "--workers", "1"]) == 1
    assert prep(*more).status == 0
    assert tree(out) == once
    jobs = tmp_path / "jobs"
    assert main([str(word) for word in ("plan", *both[:5], jobs, *both[6:])]) == 0
    for part in ("2:", ":2"):
        assert main(["range", "--out", str(jobs), "--range", part, "--workers", "1"]) == 0
    assert main(["finish", "--out", str(jobs)]) == 0
    assert tree(jobs) == once


def test_verify_compares_targets_in_tars_with_the_index(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep, capfd: pytest.CaptureFixture[str]
) -> None:
    assert prep(*argv(photos, label_table(tmp_path / "t.csv", names), tmp_path / "s")).status == 0
    tar = tmp_path / "s" / "32" / "train-000000.tar"
    tar.write_bytes(tar.read_bytes().replace(b'{"labels": [0', b'{"labels": [7', 1))
    assert verify([str(tmp_path / "s"), "--workers", "1"]) == 1
    assert "its target has changed" in capfd.readouterr().out


def test_a_changed_table_is_a_changed_source(photos: Path, names: list[str], tmp_path: Path, prep: Prep) -> None:
    table, out = tmp_path / "t.csv", tmp_path / "s"
    assert prep(*argv(photos, label_table(table, names), out)).status == 0
    again = prep(*argv(photos, table, out))
    assert again.status == 0
    assert "already there" in again.out
    other = [own if i != 17 else [*own, "red"] if "red" not in own else [] for i, own in enumerate(LABELS)]
    label_table(table, names, other)
    assert "the source has changed in train red" in prep(*argv(photos, table, out)).err
    shutil.rmtree(out)
    value_table(table, names)
    assert prep(*argv(photos, table, out)).status == 0
    table.write_text(table.read_text().replace(repr(float(VALUES[5, 0])), "1.5"))
    assert "the source has changed in train (values)" in prep(*argv(photos, table, out)).err
    label_table(table, names)
    refused(prep(*argv(photos, table, out)), "target kind: got \"values\", expected \"labels\"")
    assert prep(*argv(photos, table, out), "--rebuild").status == 0
    assert ShardSet.open(out).target.kind == "labels"


def test_one_table_may_name_the_images_of_src_and_val(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep
) -> None:
    dense = tables(tmp_path, names)["labels"][1]
    flat = {"train": tmp_path / "train", "val": tmp_path / "val"}
    for i, name in enumerate(names):
        folder = flat["val" if i % 4 == 0 else "train"]
        folder.mkdir(exist_ok=True)
        shutil.copy(photos / name, folder / f"{i:03d}.jpg")
    both = label_table(tmp_path / "both.csv", [f"{i:03d}" for i in range(60)])
    rows = both.read_text().splitlines(keepends=True)
    parts = {"train": tmp_path / "a.csv", "val": tmp_path / "b.csv"}
    parts["train"].write_text("".join([rows[0], *(row for i, row in enumerate(rows[1:]) if i % 4)]))
    parts["val"].write_text("".join([rows[0], *rows[1::4]]))
    common = ("--src", flat["train"], "--val", flat["val"], "--res", "32")
    ran = prep(*common, "--labels", both, "--out", tmp_path / "s")
    assert ran.status == 0, ran.err
    assert "ignored: nothing" in ran.out
    for split, count in (("train", 45), ("val", 15)):
        listed = [int(name[:3]) for name in sources(tmp_path / "s", split)]
        assert len(listed) == count
        opened = ShardSet.open(tmp_path / "s")
        np.testing.assert_array_equal(opened.target.decode(opened.splits[split].samples[:]), dense[listed])
    own = ("--labels", parts["train"], "--val-labels", parts["val"], "--out", tmp_path / "t")
    assert prep(*common, *own).status == 0
    assert tree(tmp_path / "t") == tree(tmp_path / "s")
    refused(prep(*common, "--labels", parts["train"], "--out", tmp_path / "u"), "set VAL_LABELS")
    shutil.copy(flat["val"] / "000.jpg", flat["train"])
    refused(prep(*common, "--labels", both, "--out", tmp_path / "u"), "line 2 names two files, got 000")
    assert not list((tmp_path / "u").glob("*"))


def move_into_splits(photos: Path, names: Sequence[str], root: Path) -> None:
    """Photo i becomes iii.jpg in `root`/val, if i is a multiple of 4, or `root`/train."""
    for i, name in enumerate(names):
        folder = root / ("val" if i % 4 == 0 else "train")
        folder.mkdir(exist_ok=True)
        shutil.move(photos / name, folder / f"{i:03d}.jpg")


def test_a_validation_table_has_a_column_for_each_label_of_training(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep
) -> None:
    move_into_splits(photos, names, tmp_path)

    def table(path: Path, columns: Sequence[str], rows: Iterable[int]) -> Path:
        bits = [(f"{i:03d}.jpg", *(int(name in LABELS[i]) for name in columns)) for i in rows]
        return write_table(path, ("image_id", *columns), bits)

    own, val = table(tmp_path / "a.csv", NAMES, [i for i in range(60) if i % 4]), tmp_path / "b.csv"
    words = ("--src", tmp_path / "train", "--labels", own, "--val", tmp_path / "val", "--val-labels", val,
             "--res", "32", "--dry", "--out", tmp_path / "s")  # fmt: skip
    table(val, ("bright", "red", "two eyes"), range(0, 60, 4))
    refused(prep(*words), "got a table that lacks near,", "expected the 4 of SRC's table")
    table(val, ("bright", "red", "spiny", "two eyes"), range(0, 60, 4))
    refused(prep(*words), "got a table that lacks near and adds spiny,", "correct VAL_LABELS")
    table(val, ("near",), range(0, 60, 4))  # which would be a column of class numbers
    refused(prep(*words), "got a table that lacks bright, red, two eyes,", "correct VAL_LABELS")
    table(val, ("red", "bright", "two eyes", "near"), range(0, 60, 4))
    assert prep(*words).status == 0, "the order is free"


def test_a_validation_column_of_a_single_class_is_not_one_of_class_numbers(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep
) -> None:
    move_into_splits(photos, names, tmp_path)
    rows = [(f"{i:03d}.jpg", i % 2, (i + 1) % 2) for i in range(60)]
    own = write_table(tmp_path / "a.csv", ("image_id", "far", "near"), [row for i, row in enumerate(rows) if i % 4])
    val = write_table(tmp_path / "b.csv", ("image_id", "far"), [(name, 1) for name, *_ in rows[::4]])
    refused(
        prep("--src", tmp_path / "train", "--labels", own, "--val", tmp_path / "val", "--val-labels", val,
             "--res", "32", "--dry", "--out", tmp_path / "s"),
        "got a table that lacks near, expected the 2 of SRC's table",
    )  # fmt: skip


def samples_of(photos: Path, names: Sequence[str], contents: Sequence[object]) -> list[Any]:
    return [
        (f"{i:03d}.jpg", (photos / name).read_bytes(), {"json": json.dumps(content).encode()})
        for i, (name, content) in enumerate(zip(names, contents, strict=True))
    ]


@pytest.mark.parametrize(
    ("form", "kind"), [("names", "labels"), ("numbers", "labels"), ("list", "values"), ("number", "values")]
)
def test_webdataset_json_holds_labels_or_values(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep, form: str, kind: str
) -> None:
    dense = tables(tmp_path, names)[kind][1]
    contents = {
        "names": [{"labels": own} for own in LABELS],
        "numbers": [{"labels": [NAMES.index(name) for name in own], "width": 3} for own in LABELS],
        "list": [{"target": row.tolist()} for row in VALUES],
        "number": [{"target": float(row[0])} for row in VALUES],
    }[form]
    src = pack_samples(tmp_path / "wds.tar", samples_of(photos, names, contents))
    ran = prep("--src", src, "--out", tmp_path / "s", "--res", "32")
    assert ran.status == 0, ran.err
    opened = ShardSet.open(tmp_path / "s")
    assert opened.target.kind == kind
    expected_names = {"names": NAMES, "numbers": tuple("0123"), "list": ("target 0", "target 1"), "number": ("target",)}
    assert opened.target.names == expected_names[form]
    for split in ("train", "val"):
        rows = dense[[int(name.split("/")[1][:3]) for name in sources(tmp_path / "s", split)]]
        np.testing.assert_array_equal(
            opened.target.decode(opened.splits[split].samples[:]), rows[:, :1] if form == "number" else rows
        )


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


@pytest.mark.parametrize("form", ["names", "classes", "floats", "float", "columns", "bits"])
def test_parquet_lists_and_numbers_are_targets(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep, form: str
) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    numbers = [[NAMES.index(name) for name in own] for own in LABELS]
    columns: dict[str, Any] = {"image": pa.array([{"bytes": (photos / name).read_bytes()} for name in names])}
    kind, columns_option = "values", ()
    if form in ("names", "classes"):
        kind = "labels"
        columns["labels"] = pa.array(LABELS) if form == "names" else pa.array(numbers, pa.list_(pa.int64()))
    elif form == "floats":
        columns["target"] = pa.array(VALUES.tolist(), pa.list_(pa.float32()))
    elif form == "float":
        columns |= {"age": pa.array(VALUES[:, 0])}
    elif form == "columns":
        columns |= {"age [a]": pa.array(VALUES[:, 0]), "x": pa.array(VALUES[:, 1]), "note": pa.array(["?"] * 60)}
        columns_option = ("--columns", "image,age [a]..x")
    else:
        kind = "labels"
        columns |= {name: pa.array([name in own for own in LABELS]) for name in NAMES}
        columns_option = ("--columns", f"image,{NAMES[0]}..{NAMES[-1]}")
    table = pa.table(columns)
    feature = {"_type": "Sequence", "feature": {"_type": "ClassLabel", "names": list(NAMES)}}
    if form == "classes":
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": {"labels": feature}}})})
    parquet.write_table(table, tmp_path / "p.parquet")
    ran = prep("--src", tmp_path / "p.parquet", "--out", tmp_path / "s", "--res", "32", *columns_option)
    assert ran.status == 0, ran.err
    opened = ShardSet.open(tmp_path / "s")
    dense = tables(tmp_path, names)[kind][1]
    expected = {"floats": ("target 0", "target 1"), "float": ("age",), "columns": ("age", "x")}
    assert opened.target.names == expected.get(form, NAMES)
    for split in ("train", "val"):
        rows = dense[[int(name.split("/")[1]) for name in sources(tmp_path / "s", split)]]
        np.testing.assert_array_equal(
            opened.target.decode(opened.splits[split].samples[:]), rows[:, :1] if form == "float" else rows
        )


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
        contents = [{"label": score} for score in scores]
        src = ("--src", pack_samples(tmp_path / "w.tar", samples_of(photos, names, contents)))
    words = (*src, "--out", tmp_path / "s", "--res", "32", "--dry")
    refused(prep(*words), "got 45 different ones for 60 photos, 42 of them once", "TARGET=values", "TARGET=class")
    for target, shown in (("values", "1 value"), ("class", "145 classes")):
        ran = prep(*words, "--target", target)
        assert ran.status == 0, ran.err
        assert f"60 images, {shown}" in ran.out
    few = tmp_path / "few.csv"
    write_table(few, ("id", "label"), [(name, i % 22) for i, name in enumerate(names)])
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
    page = (tmp_path / "s" / "report.html").read_text()
    for text in ("Labels per sample", "two eyes"):
        assert text in page


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
    page = (tmp_path / "s" / "report.html").read_text()
    assert "angle" in page
    assert "greatest" in page


def test_a_dry_run_shows_what_a_table_means(photos: Path, names: list[str], tmp_path: Path, prep: Prep) -> None:
    ran = prep(*argv(photos, value_table(tmp_path / "t.csv", names), tmp_path / "s"), "--dry")
    assert ran.status == 0, ran.err
    assert "2 numbers for each of 60 photos (TARGET=values): 2 columns of numbers" in ran.out
    assert f"line 2: {names[0]}: age {VALUES[0, 0]:.6g} years" in ran.out
    assert "60 images, 2 values (age, mass)" in ran.out
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("kind", ["labels", "values"])
def test_an_extension_keeps_old_targets_and_adds_new_ones(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep, kind: str
) -> None:
    old, out = names[:40], tmp_path / "s"
    for name in names[40:]:
        (tmp_path / "later" / name).parent.mkdir(parents=True, exist_ok=True)
        (photos / name).rename(tmp_path / "later" / name)
    labels = [[name for name in own if name != "bright"] for own in LABELS[:40]]
    all_labels, table = [*labels, *LABELS[40:]], tmp_path / "t.csv"
    if kind == "values":
        value_table(table, names)
        table.write_text("".join(table.read_text().splitlines(keepends=True)[:41]))
    else:
        label_table(table, old, labels)
    assert prep(*argv(photos, table, out)).status == 0
    before = tree(out)
    for name in names[40:]:
        (tmp_path / "later" / name).rename(photos / name)
    if kind == "values":
        value_table(table, names)
    else:
        label_table(table, names, all_labels)
    ran = prep(*argv(photos, table, out), "--extend")
    assert ran.status == 0, ran.err
    described = ("manifest.json", "_info.json", "README.md", "croissant.json")
    kept = {name for name in before if Path(name).name not in described}
    assert all(tree(out)[name] == before[name] for name in kept)
    opened = ShardSet.open(out)
    assert sum(len(split) for split in opened.splits.values()) == 60
    if kind == "labels":
        assert opened.classes == ("near", "red", "two eyes", "bright"), "a new class follows the old ones"
    dense = VALUES if kind == "values" else np.array(
        [[c in own for c in opened.classes] for own in all_labels], np.float32
    )  # fmt: skip
    for split in ("train", "val"):
        listed = [json.loads(line) for mark in ("", ".g001")
                  for line in (out / "index" / f"{split}{mark}.sources.jsonl").read_text().splitlines()]  # fmt: skip
        own = dense[[names.index(name) for name in listed]]
        np.testing.assert_array_equal(opened.target.decode(opened.splits[split].samples[:]), own)
    assert verify([str(out), "--workers", "1"]) == 0
    assert "already there" in prep(*argv(photos, table, out)).out
    lines = table.read_text().splitlines(keepends=True)
    other = '"[""near"", ""red""]"' if "near" not in labels[3] else '"[""red""]"'
    lines[4] = f"{names[3]},0.5,1\n" if kind == "values" else f"{names[3]},{other}\n"
    table.write_text("".join(lines))
    assert "1 changed, kept as they are" in prep(*argv(photos, table, out), "--extend").out


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves the tars open
@pytest.mark.parametrize("kind", ["labels", "values"])
def test_standard_readers_read_the_targets(
    photos: Path, names: list[str], tmp_path: Path, prep: Prep, kind: str
) -> None:
    wds = pytest.importorskip("webdataset")
    fn = pytest.importorskip("nvidia.dali.fn")
    pipeline_def = pytest.importorskip("nvidia.dali.pipeline").pipeline_def
    table, dense = tables(tmp_path, names)[kind]
    assert prep(*argv(photos, table, tmp_path / "s"), "--val-frac", 0).status == 0
    paths = sorted(map(str, (tmp_path / "s" / "32").glob("*.tar")))
    rows = dense[[names.index(name) for name in sources(tmp_path / "s", "train")]]

    def target(content: dict[str, list[float]]) -> list[float]:
        if kind == "values":
            return np.float32(content["target"]).tolist()
        return [float(c in content["labels"]) for c in range(len(NAMES))]

    samples = list(wds.WebDataset(paths, shardshuffle=False).decode("pil").to_tuple("jpg", "json"))
    gc.collect()
    assert [target(content) for _, content in samples] == rows.tolist()
    assert all(isinstance(image, Image.Image) for image, _ in samples)

    @pipeline_def(batch_size=60, num_threads=1, device_id=None)
    def graph() -> Any:
        return tuple(fn.readers.webdataset(
            paths=paths, index_paths=[path.replace(".tar", ".idx") for path in paths], ext=["jpg", "json"],
            missing_component_behavior="error",
        ))  # fmt: skip

    pipe = graph()
    pipe.build()
    images, contents = pipe.run()
    assert [target(json.loads(contents.at(i).tobytes())) for i in range(60)] == rows.tolist()
    assert all(Image.open(io.BytesIO(images.at(i).tobytes())).format == "JPEG" for i in range(60))
