"""Every mistake a user can make is one line that says what to do, and nothing is written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

Prep = Callable[..., Any]
def fails(ran: Any, *words: str) -> None:
    assert ran.status == 2, ran.out
    err = ran.err
    assert err.count("\n") == 1, err
    assert err.startswith("prep: ")
    assert "Traceback" not in err
    for word in words:
        assert word in err, err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--res", "abc"), ("RES", "'abc'", "128,160,224")),
        (("--res", "128,,160"), ("RES", "'128,,160'")),
        (("--res", ""), ("RES",)),
        (("--res", "160,128"), ("not strictly ascending", "got 160,128", "expected 128,160")),
        (("--res", "128,128"), ("not strictly ascending",)),
        (("--res", "4,128"), ("too small", "at least 8")),
        (("--res", "-5"), ("RES",)),
        (("--quality", "0"), ("--quality", "got 0", "1 to 100")),
        (("--quality", "101"), ("--quality", "got 101")),
        (("--quality", "high"), ("--quality", "high")),
        (("--margin", "0.9"), ("--margin", "got 0.9")),
        (("--margin", "nan"), ("--margin", "got nan")),
        (("--val-frac", "0"), ("--val-frac", "got 0.0")),
        (("--val-frac", "1"), ("--val-frac", "got 1.0")),
        (("--max-bad", "2"), ("--max-bad", "got 2.0")),
        (("--shard-samples", "0"), ("--shard-samples", "got 0")),
        (("--workers", "-1"), ("--workers", "got -1")),
        (("--seed", "-1"), ("--seed", "got -1")),
        (("--val", "a", "--val-list", "b"), ("--val: cannot be combined with --val-list",)),
        (("--val-frac", "0.2", "--folds", "5"), ("--val-frac: cannot be combined with --folds",)),
        (("--folds", "1"), ("--folds", "got 1", "2 to 255")),
        (("--engine", "spark"), ("spark", "local", "ray")),
        (("--ray-address", "a:1"), ("--ray-address: has no effect", "ENGINE=ray")),
        (("--kind", "zip"), ("zip", "archive")),
        (("--qualty", "90"), ("--qualty", "--help")),
    ],
)
def test_bad_settings_are_told_in_one_line(
    argv: tuple[str, ...], words: tuple[str, ...], photos: Path, tmp_path: Path, prep: Prep
) -> None:
    base = ["--src", photos, "--out", tmp_path / "s"]
    if "--res" not in argv:
        base += ["--res", "32"]
    fails(prep(*base, *argv), *words)
    assert not (tmp_path / "s").exists()


def test_missing_source_is_told(tmp_path: Path, prep: Prep) -> None:
    fails(prep("--src", tmp_path / "gone", "--out", tmp_path / "s", "--res", "32"), "gone", "no such folder", "SRC")


def test_source_that_is_a_file_is_told(tmp_path: Path, prep: Prep) -> None:
    (tmp_path / "a.jpg").write_bytes(b"")
    fails(prep("--src", tmp_path / "a.jpg", "--out", tmp_path / "s", "--res", "32"), "got a file", "SRC")


def test_source_without_class_folders_is_told(photos: Path, tmp_path: Path, prep: Prep) -> None:
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.jpg").write_bytes((photos / "bee" / "03.jpg").read_bytes())
    fails(prep("--src", tmp_path / "flat", "--out", tmp_path / "s", "--res", "32"), "no classes", "class folder")


def test_a_single_class_is_told(photos: Path, tmp_path: Path, prep: Prep) -> None:
    for name in ("bee", "cat"):
        (photos / name).rename(tmp_path / name)
    fails(prep("--src", photos, "--out", tmp_path / "s", "--res", "32"), "one class (apple)", "at least two")


def test_validation_class_that_training_lacks_is_told(photos: Path, tmp_path: Path, prep: Prep) -> None:
    (tmp_path / "val" / "dog").mkdir(parents=True)
    (tmp_path / "val" / "dog" / "a.jpg").write_bytes(b"x")
    argv = ("--src", photos, "--val", tmp_path / "val", "--out", tmp_path / "s", "--res", "32")
    fails(prep(*argv), "classes that training lacks", "dog")


def test_missing_validation_folder_and_list_are_told(photos: Path, tmp_path: Path, prep: Prep) -> None:
    argv = ("--src", photos, "--out", tmp_path / "s", "--res", "32")
    fails(prep(*argv, "--val", tmp_path / "gone"), "no such folder", "VAL")
    fails(prep(*argv, "--val-list", tmp_path / "gone.txt"), "cannot be read", "VAL_LIST")


def test_output_among_the_photos_is_told(photos: Path, prep: Prep) -> None:
    for out in (photos, photos / "shards", photos / "bee" / "x"):
        fails(prep("--src", photos, "--out", out, "--res", "32"), "is inside SRC", "OUT")
    assert not (photos / "shards").exists()


def test_overlapping_validation_folder_is_told(photos: Path, tmp_path: Path, prep: Prep) -> None:
    argv = ("--src", photos, "--val", photos / "bee", "--out", tmp_path / "s", "--res", "32")
    fails(prep(*argv), "overlaps SRC")


def test_somebody_elses_folder_is_refused_and_untouched(photos: Path, tmp_path: Path, prep: Prep) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("mine")
    argv = ("--src", photos, "--out", tmp_path / "home", "--res", "32", "--rebuild")
    fails(prep(*argv), "not empty and not a shard set", "thesis.tex")
    (tmp_path / "home" / "manifest.json").write_text('{"name": "web app"}')
    fails(prep(*argv), "manifest.json", "not a shard set")
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["manifest.json", "thesis.tex"]


def test_output_that_cannot_be_made_is_told(photos: Path, tmp_path: Path, prep: Prep) -> None:
    (tmp_path / "file").write_text("mine")
    fails(prep("--src", photos, "--out", tmp_path / "file", "--res", "32"), "got a file", "OUT")
    fails(prep("--src", photos, "--out", tmp_path / "file" / "s", "--res", "32"), "cannot be written", "OUT")


def test_output_without_permission_is_told(
    photos: Path, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    fails(prep("--src", photos, "--out", tmp_path / "s", "--res", "32"), "Permission denied", "OUT")


def test_the_real_command_line_behaves_so(tmp_path: Path) -> None:
    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "prep", *argv]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    helped = run("--help")
    assert helped.returncode == 0
    assert "--max-bad" in helped.stdout
    failed = run("--src", str(tmp_path / "gone"), "--out", str(tmp_path / "s"), "--res", "32")
    assert failed.returncode == 2
    assert failed.stderr.count("\n") == 1
    assert "no such folder" in failed.stderr
