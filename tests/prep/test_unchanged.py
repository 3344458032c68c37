"""A finished set whose source has not changed is recognised without listing it again, and any change is noticed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.source_formats import files_in, jpeg, pack_parquet, pack_table, pack_tar
from tests.support.trees import tree

Prep = Callable[..., Any]
DONE = "nothing to do"


@pytest.fixture
def slow_path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A line for each time that the photos are listed into a table."""
    from resolute.prep.listing import inputs

    listed: list[str] = []
    real = inputs.list_photos

    def list_photos(*args: Any, **more: Any) -> Any:
        listed.append("listed")
        return real(*args, **more)

    monkeypatch.setattr(inputs, "list_photos", list_photos)
    return listed


def make(root: Path, kind: str, count: int = 8) -> tuple[object, ...]:
    """A source of photos in two classes; returns its arguments."""
    root.mkdir(exist_ok=True)
    files = {f"{'ab'[i % 2]}/{i}.jpg": jpeg(i) for i in range(count)}
    rows = [(name, name[0]) for name in files]
    if kind in ("folder", "table"):
        for name, data in files.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_bytes(data)
    if kind == "folder":
        return ("--src", root)
    if kind == "table":
        return ("--src", root, "--labels", pack_table(root.parent / "labels.csv", rows))
    cells = [(data, name, i % 2) for i, (name, data) in enumerate(files.items())]
    return ("--src", pack_parquet(root / "x.parquet", cells, None))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "table", "parquet"])
def test_an_unchanged_source_is_recognised_and_a_further_photo_noticed(
    tmp_path: Path, prep: Prep, slow_path: list[str], kind: str
) -> None:
    out = tmp_path / "s"
    argv = (*make(tmp_path / "p", kind), "--out", out, "--res", "16,24", "--val-frac", 0)
    assert prep(*argv).status == 0
    before, listed = tree(out), len(slow_path)
    again = prep(*argv)
    assert (again.status, len(slow_path)) == (0, listed), again.err
    assert DONE in again.out
    assert DONE in prep(*argv[:-3], "24", *argv[-2:]).out, "some of its sizes"
    assert len(slow_path) == listed
    assert tree(out) == before
    assert not (out / ".prep").exists()
    make(tmp_path / "p", kind, 10)
    other = prep(*argv)
    assert len(slow_path) > listed
    assert (other.status, "the source has changed" in other.err) == (2, True), other.err
    extended = prep(*argv, "--extend")
    assert extended.status == 0, extended.err
    listed = len(slow_path)
    assert DONE in prep(*argv).out
    assert len(slow_path) == listed
    assert prep(*argv, "--extend").status == 0
    assert len(slow_path) > listed, "an extension compares the photos"


def replace(path: Path, old: str, new: str) -> None:
    assert old in path.read_text("utf-8-sig")
    path.write_text(path.read_text("utf-8-sig").replace(old, new))


@pytest.mark.slow
def test_a_change_of_the_source_or_a_setting_is_never_missed(tmp_path: Path, prep: Prep, slow_path: list[str]) -> None:
    photos, val_list, classes = tmp_path / "p", tmp_path / "val.txt", tmp_path / "classes.txt"
    val_list.write_text("a/0.jpg\nb/1.jpg\n")
    classes.write_text("a\nb\n")
    argv = (
        *make(photos, "table"),
        "--out",
        tmp_path / "s",
        "--res",
        "16",
        "--val-list",
        val_list,
        "--classes",
        classes,
        "--max-bad",
        0.5,
    )
    changes: dict[str, Callable[[], object]] = {
        "nothing yet": lambda: None,
        "a photo's size": lambda: (photos / "a/2.jpg").write_bytes(jpeg(2) + b"12345"),
        "a label": lambda: replace(tmp_path / "labels.csv", "a/2.jpg,a", "a/2.jpg,b"),
        "val list": lambda: replace(val_list, "b/1.jpg", "b/3.jpg"),
        "classes": lambda: replace(classes, "b\n", "b\nc\n"),
        "a photo's name": lambda: (photos / "a/4.jpg").rename(photos / "a/z.jpg"),
    }
    for change, apply in changes.items():
        apply()
        listed = len(slow_path)
        prep(*argv)
        assert len(slow_path) > listed, change
        assert prep(*argv, "--rebuild").status == 0, change
        listed = len(slow_path)
        assert DONE in prep(*argv).out, change
        assert len(slow_path) == listed, change
    for more in (("--quality", 80), ("--res", "16,24")):
        listed = len(slow_path)
        prep(*argv, *more)
        assert len(slow_path) > listed, more


def test_a_validation_source_is_part_of_the_signature(tmp_path: Path, prep: Prep, slow_path: list[str]) -> None:
    val = pack_tar(tmp_path / "v.tar", files_in({f"{'ab'[i % 2]}/{i}.jpg": jpeg(20 + i) for i in range(4)}, ""))
    argv = (*make(tmp_path / "p", "folder"), "--val", val, "--out", tmp_path / "s", "--res", "16")
    assert prep(*argv).status == 0
    os.utime(val, ns=(1, 1))
    for listed_again in (True, False):  # the same photos in another file, whose state is known then
        listed = len(slow_path)
        assert DONE in prep(*argv).out
        assert (len(slow_path) > listed) == listed_again
