"""Demo photos: the same every time, whole or not there, and not to be told by colour."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.examples.demo_photos import main
from pipeline.examples.demo_scene import CLASSES, draw

ROOT = Path(__file__).parents[3]


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_same_photos_with_any_number_of_workers(tmp_path: Path) -> None:
    for workers in ("1", "2"):
        out = tmp_path / workers
        # why a process: its workers import the function that draws from the program's main module
        command = [sys.executable, "-m", "pipeline.examples.demo_photos", "--out", str(out), "--images", "30"]
        subprocess.run([*command, "--workers", workers], cwd=ROOT, check=True)
        assert sorted(path.name for path in out.iterdir() if path.is_dir()) == sorted(CLASSES)
    assert tree(tmp_path / "1") == tree(tmp_path / "2")
    assert len(list((tmp_path / "1").rglob("*.jpg"))) == 30


def test_demo_is_recognised_and_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_interrupted_demo_is_not_taken_for_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    argv = ["--out", str(tmp_path / "demo"), "--images", "10", "--workers", "1"]
    monkeypatch.setattr("pipeline.examples.demo_photos.tqdm", interrupt)
    assert main(argv) == 130
    assert not (tmp_path / "demo").exists()
    monkeypatch.undo()
    assert main(argv) == 0
    assert len(list((tmp_path / "demo").rglob("*.jpg"))) == 10
    assert not (tmp_path / "demo.part").exists()


def test_photos_are_camera_like_and_of_many_shapes() -> None:
    photos = [draw(np.random.default_rng([0, i]), i % len(CLASSES)) for i in range(40)]
    shapes = np.array([photo.shape[:2] for photo in photos])
    assert len(np.unique(shapes, axis=0)) > 30
    assert (shapes[:, 0] > shapes[:, 1]).any()
    assert (shapes[:, 0] < shapes[:, 1]).any()
    assert shapes.min() > 200
    assert shapes.max() < 800
    sizes = []
    for photo in photos:
        buffer = io.BytesIO()
        Image.fromarray(photo).save(buffer, "JPEG", quality=92)
        sizes.append(len(buffer.getvalue()))
    assert 50_000 < np.mean(sizes) < 150_000


def test_class_changes_the_picture_and_nothing_else() -> None:
    pictures = [draw(np.random.default_rng(3), label) for label in range(len(CLASSES))]
    assert len({picture.shape for picture in pictures}) == 1
    for i in range(len(pictures)):
        for j in range(i):
            differing = (pictures[i] != pictures[j]).any(axis=2).mean()
            assert 0.001 < differing < 0.6, (CLASSES[i], CLASSES[j])
