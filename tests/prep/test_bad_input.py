"""Every invalid setting, source and output is reported in one line that says what to do, and nothing is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.trees import tree

Prep = Callable[..., Any]


def fails(ran: Any, *words: str) -> None:
    assert ran.status == 2, ran.out
    err = ran.err
    assert err.count("\n") == 1, err
    assert err.startswith("resolute shards: ")
    assert "Traceback" not in err
    for word in words:
        assert word in err, err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--res", "160,128"), ("--res: got 160,128, expected it ascending; write it as 128,160",)),
        (("--res", "128,128"), ("write it as 128\n",)),
        (("--res", "60000"), ("--res: got 60000, expected at most 57312 px each",)),
        (("--margin", "nan"), ("--margin: got 'nan'",)),
        (("--val-frac", "1"), ("--val-frac: got '1', expected number, at least 0, below 1",)),
        (("--val", "a", "--val-list", "b"), ("--val: cannot be combined with --val-list",)),
        (("--val-list", "b", "--val-frac", "0"), ("--val-list: cannot be combined with --val-frac",)),
        (("--engine", "ray", "--workers", "2"), ("WORKERS: has no effect with ENGINE=ray, got 2", "omit WORKERS")),
        (("--ray-address", "a:1"), ("--ray-address: has no effect", "ENGINE=ray")),
    ],
)
def test_bad_settings_are_reported_in_one_line(
    argv: tuple[str, ...], words: tuple[str, ...], photos: Path, tmp_path: Path, prep: Prep
) -> None:
    fails(prep("--src", photos, "--out", tmp_path / "s", "--res", "32", *argv), *words)
    assert not (tmp_path / "s").exists()


def test_bad_sources_and_outputs_are_reported_in_one_line(photos: Path, tmp_path: Path, prep: Prep) -> None:
    (tmp_path / "single" / "elk").mkdir(parents=True)
    shutil.copy(photos / "bee" / "03.jpg", tmp_path / "single" / "elk")
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for changes, words in (
        ({"--src": "gone"}, ("gone", "no such folder", "SRC")),
        ({"--src": "photos/bee/03.jpg"}, ("got a file", "SRC")),
        ({"--src": "photos/bee/more"}, ("no classes", "class folder")),
        ({"--src": "single"}, ("one class (elk)", "at least two")),
        ({"--val": "single"}, ("classes that training lacks", "elk")),
        ({"--val": "gone"}, ("no such folder", "VAL")),
        ({"--val": "photos/bee"}, ("overlaps SRC",)),
        ({"--val-list": "gone.txt"}, ("cannot be read", "VAL_LIST")),
        ({"--out": "photos/shards"}, ("is inside SRC", "OUT")),
        ({"--out": "file"}, ("got a file", "OUT")),
        ({"--out": "file/s"}, ("not written", "choose a path")),
    ):
        paths = {"--src": "photos", "--out": "s", **changes}
        fails(prep(*(word for name, path in paths.items() for word in (name, tmp_path / path)), "--res", "32"), *words)
        assert sorted(tmp_path.rglob("*")) == before, changes


def test_a_table_of_photos_without_a_plan_is_what_a_killed_run_left(
    photos: Path, set_template: Path, tmp_path: Path, prep: Prep
) -> None:
    """Of the files that are for the whole set, it is written first."""
    (tmp_path / "s" / "records").mkdir(parents=True)
    shutil.copy(set_template / "records" / "photos.parquet", tmp_path / "s" / "records")
    assert prep("--src", photos, "--res", "32,48", "--shard-samples", 20, "--out", tmp_path / "s").status == 0
    assert tree(tmp_path / "s") == tree(set_template)


def test_a_folder_that_is_not_a_set_is_refused_and_not_changed(photos: Path, tmp_path: Path, prep: Prep) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("mine")
    argv = ("--src", photos, "--out", tmp_path / "home", "--res", "32", "--rebuild")
    fails(prep(*argv), "not empty and not a shard set", "thesis.tex")
    (tmp_path / "home" / "manifest.json").write_text('{"name": "web app"}')
    fails(prep(*argv), "manifest.json", "not a shard set")
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["manifest.json", "thesis.tex"]
