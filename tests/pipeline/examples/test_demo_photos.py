"""Demo photos: recognised when they are there, and no other folder is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from resolute.pipeline.examples.demo_photos import main
from tests.support.trees import tree


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
