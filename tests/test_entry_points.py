"""Every command line ends without a traceback: on Ctrl-C during imports, and with a closed, full or unread output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import ROOT
from tests.conftest import make_photos
from tests.support.cli import prep
from tests.support.trees import tree


@pytest.mark.parametrize(
    "words",
    [
        ("resolute", "shards", "--src", "photos", "--out", "shards"),
        ("resolute", "train", "--shards", "shards", "--recipe", str(ROOT / "train/recipes/demo.toml")),
        ("resolute.pipeline.examples.demo_photos", "--out", "photos"),
    ],
    ids=lambda words: words[1],
)
def test_ctrl_c_during_imports_prints_no_traceback(tmp_path: Path, words: Sequence[str]) -> None:
    # a NumPy that never finishes its import; torch needs none, so it has to wait as well
    for name in ("numpy", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            "import sys, time; print('importing', file=sys.__stdout__, flush=True); time.sleep(60)"
        )
    with subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert errors.count("\n") <= 1


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `resolute COMMAND` in a shell, with redirections."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m resolute {command}"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("keys | head -n 1", 0),
        ("eval --help > /dev/full", 2),
        ("shards --help >&-", 0),
        ("shards --src gone --out gone 2>&-", 2),
    ],
)
def test_a_closed_full_or_unread_output_prints_no_traceback(command: str, status: int) -> None:
    done = shell(command)
    assert done.returncode == status
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_file_names_are_utf8_in_every_locale(tmp_path: Path) -> None:
    folder, photos = tmp_path / "größe", make_photos(tmp_path / "photos", each=6)
    folder.mkdir()
    (photos / "class1" / "müd.jpg").write_bytes((photos / "class1" / "001.jpg").read_bytes() + b"\0")
    (folder / "välid.txt").write_text("class1/müd.jpg\nclass0/002.jpg\n")
    words = f"--src {photos} --val-list {folder}/välid.txt --res 32 --workers 1 --out"
    assert prep([*words.split(), folder / "a"]) == 0
    done = shell(f"shards {words} {folder}/b", LC_ALL="C", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert f"{folder}/b: 19 images" in done.stdout
    assert tree(folder / "a") == tree(folder / "b")
