"""Every invalid setting, source and output is reported in one line that says what to do, and nothing is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
        (("--res", "abc"), ("--res: got 'abc', expected list of numbers, at least 8",)),
        (("--res", "128,,160"), ("--res: got ''",)),
        (("--res", ""), ("--res: got an empty value",)),
        (("--res", "160,128"), ("--res: got 160,128, expected it ascending; write it as 128,160",)),
        (("--res", "128,128"), ("write it as 128\n",)),
        (("--res", "4,128"), ("--res: got '4'", "at least 8")),
        (("--res=-5",), ("--res: got '-5'",)),
        (("--res", "60000"), ("--res: got 60000, expected at most 57312 px each",)),
        (("--quality", "0"), ("--quality: got '0', expected integer, 1 to 100",)),
        (("--quality", "101"), ("--quality: got '101'",)),
        (("--quality", "high"), ("--quality: got 'high'",)),
        (("--margin", "0.9"), ("--margin: got '0.9'",)),
        (("--margin", "nan"), ("--margin: got 'nan'",)),
        (("--val-frac=-0.1",), ("--val-frac: got '-0.1'",)),
        (("--val-frac", "1"), ("--val-frac: got '1', expected number, at least 0, below 1",)),
        (("--max-bad", "2"), ("--max-bad: got '2'",)),
        (("--shard-samples", "0"), ("--shard-samples: got '0'",)),
        (("--workers=-1",), ("--workers: got '-1'",)),
        (("--seed=-1",), ("--seed: got '-1'",)),
        (("--val", "a", "--val-list", "b"), ("--val: cannot be combined with --val-list",)),
        (("--val-list", "b", "--val-frac", "0"), ("--val-list: cannot be combined with --val-frac",)),
        (("--folds", "5"), ("--folds", "--help")),
        (("--engine", "spark"), ("spark", "local", "ray")),
        (("--engine", "ray", "--workers", "2"), ("WORKERS: has no effect with ENGINE=ray, got 2", "omit WORKERS")),
        (("--ray-address", "a:1"), ("--ray-address: has no effect", "ENGINE=ray")),
        (("--kind", "zip"), ("zip", "archive")),
        (("--qualty", "90"), ("--qualty", "--help")),
    ],
)
def test_bad_settings_are_reported_in_one_line(
    argv: tuple[str, ...], words: tuple[str, ...], photos: Path, tmp_path: Path, prep: Prep
) -> None:
    base = ["--src", photos, "--out", tmp_path / "s"]
    if not argv[0].startswith("--res"):
        base += ["--res", "32"]
    fails(prep(*base, *argv), *words)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(("changes", "words"), [
    ({"--src": "gone"}, ("gone", "no such folder", "SRC")),
    ({"--src": "photos/bee/03.jpg"}, ("got a file", "SRC")),
    ({"--src": "photos/bee/more"}, ("no classes", "class folder")),
    ({"--src": "single"}, ("one class (elk)", "at least two")),
    ({"--val": "single"}, ("classes that training lacks", "elk")),
    ({"--val": "gone"}, ("no such folder", "VAL")),
    ({"--val": "photos/bee"}, ("overlaps SRC",)),
    ({"--val-list": "gone.txt"}, ("cannot be read", "VAL_LIST")),
    ({"--out": "photos"}, ("is inside SRC", "OUT")),
    ({"--out": "photos/shards"}, ("is inside SRC", "OUT")),
    ({"--out": "photos/bee/x"}, ("is inside SRC", "OUT")),
    ({"--out": "file"}, ("got a file", "OUT")),
    ({"--out": "file/s"}, ("not written", "choose a path")),
])  # fmt: skip
def test_bad_sources_and_outputs_are_reported_in_one_line(
    changes: dict[str, str], words: tuple[str, ...], photos: Path, tmp_path: Path, prep: Prep
) -> None:
    (tmp_path / "single" / "elk").mkdir(parents=True)
    shutil.copy(photos / "bee" / "03.jpg", tmp_path / "single" / "elk")
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    paths = {"--src": "photos", "--out": "s", **changes}
    fails(prep(*(word for name, path in paths.items() for word in (name, tmp_path / path)), "--res", "32"), *words)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_table_of_photos_without_a_plan_is_what_a_killed_run_left(photos: Path, tmp_path: Path, prep: Prep) -> None:
    """Of the files that are for the whole set, it is written first."""
    argv = ("--src", photos, "--res", "32", "--out")
    assert prep(*argv, tmp_path / "whole").status == 0
    (tmp_path / "killed" / "records").mkdir(parents=True)
    shutil.copy(tmp_path / "whole" / "records" / "photos.parquet", tmp_path / "killed" / "records")
    assert prep(*argv, tmp_path / "killed").status == 0
    whole, killed = (sorted((tmp_path / name / "32").glob("*.tar")) for name in ("whole", "killed"))
    assert [path.read_bytes() for path in whole] == [path.read_bytes() for path in killed] != []


def test_a_folder_that_is_not_a_set_is_refused_and_not_changed(photos: Path, tmp_path: Path, prep: Prep) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("mine")
    argv = ("--src", photos, "--out", tmp_path / "home", "--res", "32", "--rebuild")
    fails(prep(*argv), "not empty and not a shard set", "thesis.tex")
    (tmp_path / "home" / "manifest.json").write_text('{"name": "web app"}')
    fails(prep(*argv), "manifest.json", "not a shard set")
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["manifest.json", "thesis.tex"]


def test_an_output_folder_without_permission_is_reported(
    photos: Path, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    fails(prep("--src", photos, "--out", tmp_path / "s", "--res", "32"), "Permission denied", "choose a writable path")
