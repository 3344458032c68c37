"""The lists of a set's photos: a specification names their rows, not the bytes that some DuckDB gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from resolute.pipeline.dataset.manifest import is_sealed
from resolute.prep.listing.database import Database
from resolute.prep.shard_set.set_photos import SetPhotos, local_photos, write_photos
from resolute.prep.storage.output import LocalStore
from tests.support.cli import verify
from tests.support.manifests import generation_spec
from tests.support.source_formats import jpeg
from tests.support.trees import tree

Prep = Callable[..., Any]
TARGETS = {
    "class": ("UINTEGER", ["3", "4", "5"]),
    "labels": ("UINTEGER[]", ["[1, 2]", "[]", "[7]"]),
    "values": ("FLOAT[]", ["'[0.1, nan]'", "'[1e30, -0.0]'", "'[inf, 3]'"]),
}
SPEC = generation_spec(images={"train": 2, "val": 1})


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(tmp_path)
    yield opened
    opened.close()


def plan_rows(database: Database, kind: str, *, in_order: bool) -> None:
    """The table `planned` of three photos."""
    column, targets = TARGETS[kind]
    rows = [
        f"('{split}', {key}, 'n{key}\\xFF'::BLOB, {key + 9}, {target}::{column}, {key == 1}, 0, NULL)"
        for (split, key), target in zip([("train", 0), ("train", 1), ("val", 0)], targets, strict=True)
    ]
    database.run(
        "CREATE OR REPLACE TABLE planned (split VARCHAR, key UBIGINT, name BLOB, size_bytes UBIGINT, "
        f"target {column}, missing BOOLEAN, generation UINTEGER, group_name VARCHAR)"
    )
    database.run(f"INSERT INTO planned VALUES {', '.join(rows if in_order else rows[::-1])}")


def in_store(root: Path, path: Path) -> LocalStore:
    """A store that has the file as the photos of generation 0."""
    (root / "s" / "records").mkdir(parents=True, exist_ok=True)
    (root / "s" / "records" / "photos.parquet").write_bytes(path.read_bytes())
    return LocalStore(root / "s")


def as_another_version_writes(path: Path) -> None:
    """Write the file again, with other bytes for the same rows, as another version of DuckDB does."""
    with duckdb.connect() as connection:
        connection.execute(f"CREATE TABLE t AS SELECT * FROM read_parquet('{path}')")
        connection.execute(f"COPY t TO '{path}' (FORMAT parquet, COMPRESSION gzip)")


@pytest.mark.parametrize("kind", TARGETS)
def test_the_specification_follows_from_the_rows_and_not_from_the_bytes_of_the_file(
    tmp_path: Path, database: Database, kind: str
) -> None:
    plan_rows(database, kind, in_order=True)
    path, spec = write_photos(database, "planned", SPEC, tmp_path)
    before = path.read_bytes()
    plan_rows(database, kind, in_order=False)
    assert write_photos(database, "planned", SPEC, tmp_path)[1] == spec
    assert path.read_bytes() == before, "in an order that is said"
    assert write_photos(database, "planned", spec, tmp_path)[1] == spec
    assert path.read_bytes() == before, "made again"

    store = in_store(tmp_path, path)
    written = tmp_path / "s" / "records" / "photos.parquet"
    as_another_version_writes(written)
    assert written.read_bytes() != before
    assert local_photos(store, spec, tmp_path) == written
    with duckdb.connect() as connection:
        connection.execute(f"CREATE TABLE t AS SELECT * FROM read_parquet('{written}')")
        connection.execute("UPDATE t SET name = 'other'::BLOB WHERE key = 1")
        connection.execute(f"COPY t TO '{written}' (FORMAT parquet)")
    assert local_photos(store, spec, tmp_path) is None, "other rows"
    written.write_bytes(before[:-30])
    assert local_photos(store, spec, tmp_path) is None, "damaged"


def test_the_photos_of_a_split_come_in_the_order_of_their_keys(tmp_path: Path, database: Database) -> None:
    plan_rows(database, "class", in_order=False)
    database.run(f"COPY planned TO '{tmp_path}/rows.parquet' (FORMAT parquet)")
    rows = SetPhotos.open(database, [tmp_path / "rows.parquet"]).of_split("train", 0)
    assert [key for key, _ in rows] == [0, 1]


def write_class_photos(root: Path, numbers: range) -> Path:
    for label in "ab":
        (root / label).mkdir(parents=True, exist_ok=True)
        for number in numbers:
            (root / label / f"{number}.jpg").write_bytes(jpeg(number + 100 * (label == "b")))
    return root


@pytest.mark.slow
def test_a_set_is_extended_resumed_and_repaired(tmp_path: Path, prep: Prep) -> None:
    out = tmp_path / "s"
    argv = ("--src", write_class_photos(tmp_path / "p", range(4)), "--out", out, "--val-frac", 0)
    assert prep(*argv, "--res", "16").status == 0
    before = tree(out)
    assert verify([out, "--workers", "1"]) == 0
    assert "nothing to do" in prep(*argv, "--res", "16").out

    for name in ("records/photos.parquet", "records/plan.json"):  # each is made again, with the same bytes
        (out / name).unlink()
        assert prep(*argv, "--res", "16").status == 0
        assert tree(out) == before
    (out / "manifest.json").unlink()
    (out / "16" / "train-000000.tar").unlink()
    assert prep(*argv, "--res", "16").status == 0
    assert tree(out) == before
    data = bytearray((out / "records" / "photos.parquet").read_bytes())
    data[len(data) // 2] ^= 1
    (out / "records" / "photos.parquet").write_bytes(data)
    assert verify([out, "--workers", "1"]) == 1
    assert prep(*argv, "--res", "16").status == 0
    assert tree(out) == before

    write_class_photos(tmp_path / "p", range(4, 7))
    ran = prep(*argv, "--extend")
    assert ran.status == 0, ran.err
    assert prep(*argv, "--res", "16,24").status == 0
    assert verify([out, "--workers", "1"]) == 0


def test_another_version_of_duckdb_resumes_extends_and_repairs_a_set(
    tmp_path: Path, prep: Prep, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s"
    argv = ("--src", write_class_photos(tmp_path / "p", range(4)), "--out", out, "--val-frac", 0)
    assert prep(*argv, "--res", "16").status == 0
    before = tree(out)
    as_another_version_writes(out / "records" / "photos.parquet")
    assert verify([out, "--workers", "1"]) == 1, "not the file that the manifest lists"
    assert "records/photos.parquet" in capfd.readouterr().out
    assert prep(*argv, "--res", "16").status == 0
    assert tree(out) == before
    as_another_version_writes(out / "records" / "photos.parquet")
    (out / "manifest.json").unlink()  # a run of another version was killed before its end
    assert prep(*argv, "--res", "16").status == 0
    assert verify([out, "--workers", "1"]) == 0
    after = tree(out)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"records/photos.parquet", "manifest.g000.16.json", "manifest.json"}
    assert is_sealed((out / "manifest.json").read_bytes())
    write_class_photos(tmp_path / "p", range(4, 6))
    assert prep(*argv, "--extend").status == 0
    assert verify([out, "--workers", "1"]) == 0
