"""Every command line ends without a traceback: on Ctrl-C during imports, and with a closed, full or unread output."""

from __future__ import annotations

import ast
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from resolute import cli
from tests import ROOT
from tests.conftest import make_photos
from tests.support.trees import tree

# examples to copy, programs that only other programs start, and a loop without any of our code
NO_COMMANDS = {*(f"pipeline/examples/{name}.py" for name in ("accelerate_loop", "lightning_loop", "plain", "start",
               "timm_loop", "transformers_loop")), "benchmarks/loaders/child.py", "benchmarks/storage/object_store.py",
               "resolute/cuda_stack.py", "train/inference/exported_predict.py"}  # fmt: skip


def test_entry_points_are_guarded_before_their_imports() -> None:
    paths = [path for package in ("pipeline", "prep", "train", "benchmarks") for path in (ROOT / package).rglob("*.py")
             if '__name__ == "__main__"' in path.read_text() and str(path.relative_to(ROOT)) not in NO_COMMANDS]
    assert len(paths) > 5
    for path in paths:
        statements = [node for node in ast.parse(path.read_text()).body if not isinstance(node, ast.Expr)]
        assert ast.unparse(statements[0]) == "from __future__ import annotations", path
        assert "guard_process()" in ast.unparse(statements[1]), path
        assert "run_main(" in ast.unparse(statements[-1]), path


@pytest.mark.parametrize("words", [
    ("resolute", "shards", "--src", "photos", "--out", "shards"),
    ("resolute", "train", "--shards", "shards", "--recipe", str(ROOT / "train/recipes/demo.toml")),
    ("resolute.pipeline.examples.demo_photos", "--out", "photos"),
], ids=lambda words: words[1])  # fmt: skip
def test_ctrl_c_during_imports_prints_no_traceback(tmp_path: Path, words: Sequence[str]) -> None:
    # a NumPy that never finishes its import; torch needs none, so it has to wait as well
    for name in ("numpy", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            "import sys, time; print('importing', file=sys.__stdout__, flush=True); time.sleep(60)"
        )
    with subprocess.Popen(
        [sys.executable, "-m", *words], cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
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
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m resolute {command}"], cwd=ROOT,
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("command", "status"), [
    ("keys | head -n 1", 0), ("eval --help > /dev/full", 2), ("shards --help >&-", 0),
    ("shards --src gone --out gone 2>&-", 2),
])  # fmt: skip
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
    sets = []
    for out, locale in ((folder / "a", {"PYTHONUTF8": "1"}), (folder / "b", {"LC_ALL": "C", "PYTHONUTF8": "0"})):
        words = f"--src {photos} --val-list {folder}/välid.txt --out {out} --res 32 --workers 1"
        done = shell(f"shards {words}", **locale)
        assert done.returncode == 0, done.stderr
        assert f"{out}: 19 images" in done.stdout
        sets.append(tree(out))
    assert sets[0] == sets[1]


def test_wandb_is_hidden_while_a_command_is_loaded_and_not_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm imports it where it is installed, which takes seconds."""
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with cli.wandb_hidden(), pytest.raises(ImportError):
        importlib.import_module("wandb")
    assert "wandb" not in sys.modules
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    with cli.wandb_hidden():
        importlib.import_module("wandb")  # what is loaded stays
    assert "wandb" in sys.modules
