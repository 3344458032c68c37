"""Demo photos: deterministic, recognised when they are there, and no other folder is overwritten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from resolute.pipeline.examples.demo_photos import main
from resolute.pipeline.examples.demo_scene import CLASSES
from tests.support.commands import Ended
from tests.support.trees import tree


@pytest.mark.slow
def test_the_photos_do_not_depend_on_the_number_of_workers(tmp_path: Path, forked: Callable[..., Ended]) -> None:
    for workers in ("1", "2"):
        out = tmp_path / workers
        # why a process: its workers import the function that draws from the program's main module
        words = ("--out", out, "--images", "30", "--workers", workers)
        assert forked("resolute.pipeline.examples.demo_photos", *words).status == 0
        assert sorted(path.name for path in out.iterdir() if path.is_dir()) == sorted(CLASSES)
    assert tree(tmp_path / "1") == tree(tmp_path / "2")
    assert len(list((tmp_path / "1").rglob("*.jpg"))) == 30


def test_existing_demo_photos_are_recognised_and_other_folders_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--out", str(tmp_path / "demo"), "--images", "10", "--workers", "1"]
    assert main(argv) == 0
    before = tree(tmp_path / "demo")
    capsys.readouterr()
    assert main(argv) == 0
    assert "already there" in capsys.readouterr().out
    assert main([*argv, "--seed", "5"]) == 2
    assert "other demo photos" in capsys.readouterr().err
    assert tree(tmp_path / "demo") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").write_text("mine")
    assert main(["--out", str(tmp_path / "mine")]) == 2
    assert "something else" in capsys.readouterr().err
