"""Every command line ends without a traceback: on Ctrl-C during imports, and with a closed, full or unread output."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import ROOT
from tests.conftest import make_photos
from tests.support.trees import tree

# examples to copy, programs that only other programs start, and a loop without any of our code
NO_COMMANDS = {*(f"pipeline/examples/{name}.py" for name in ("accelerate_loop", "lightning_loop", "plain", "start",
               "timm_loop", "transformers_loop")), "benchmarks/loaders/child.py", "benchmarks/storage/object_store.py",
               "resolute/cuda_stack.py", "train/inference/exported_predict.py"}  # fmt: skip
ENTRY_POINTS = sorted(
    path.relative_to(ROOT)
    for package in ("pipeline", "prep", "train", "benchmarks")
    for path in (ROOT / package).rglob("*.py")
    if '__name__ == "__main__"' in path.read_text() and str(path.relative_to(ROOT)) not in NO_COMMANDS
)
COMMANDS: dict[str, Sequence[str]] = {
    "shards": ("--src", "photos", "--out", "shards"),
    "verify": ("shards",),
    "resolute.pipeline.examples.demo_photos": ("--out", "photos"),
    "show": ("shards", "--recipe", "recipe.toml"),
    "train": ("--shards", "shards", "--recipe", str(ROOT / "train" / "recipes" / "demo.toml")),
    "plan": ("--shards", "shards", "--recipe", str(ROOT / "train" / "recipes" / "demo.toml")),
    "eval": ("run", "--shards", "shards"),
    "predict": ("run", "--src", "photos"),
    "export": ("run",),
    "report": ("run",),
    "compare": ("run", "other"),
    "lr": ("--recipe", "recipe.toml", "--samples", "9"),
    "lr-find": ("--shards", "shards", "--recipe", "recipe.toml"),
    "bench-all": ("--shards", "shards"),
    "bench": ("--shards", "shards"),
}


@pytest.mark.parametrize("path", ENTRY_POINTS, ids=str)
def test_entry_points_are_guarded_before_their_imports(path: Path) -> None:
    body = ast.parse((ROOT / path).read_text()).body
    statements = [node for node in body if not isinstance(node, ast.Expr)]
    assert ast.unparse(statements[0]) == "from __future__ import annotations"
    assert "guard_process()" in ast.unparse(statements[1])
    assert "run_main(" in ast.unparse(statements[-1])


def start(module: str, arguments: Sequence[object], **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}  # type: ignore[dict-item]
    command = [sys.executable, "-m", *([module] if "." in module else ["resolute", module]), *map(str, arguments)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, text=True, env=environment, **streams)  # type: ignore[call-overload]


@pytest.mark.parametrize("module", COMMANDS)
def test_ctrl_c_during_imports_prints_no_traceback(tmp_path: Path, module: str) -> None:
    # a NumPy that never finishes its import; torch needs none, so it has to wait as well
    for name in ("numpy", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            "import sys, time; print('importing', file=sys.__stdout__, flush=True); time.sleep(60)"
        )
    process = start(module, COMMANDS[module], cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert errors.count("\n") <= 1


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_photos(tmp_path_factory.mktemp("photos") / "p", each=6)


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, env={**os.environ, **environment}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("output", "status"), [("| head -n 0", 0), ("> /dev/full", 2), (">&-", 0), ("2>&-", 0), (">&- 2>&- <&-", 0)]
)
def test_prep_finishes_with_a_closed_full_or_unread_stdout(
    photos: Path, tmp_path: Path, output: str, status: int
) -> None:
    words = f"--src {photos} --out {tmp_path / 's'} --res 32 --workers 1"
    done = shell(f"{sys.executable} -m resolute shards {words} {output}")
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == (output == "> /dev/full")
    assert (tmp_path / "s" / "report.html").exists()


@pytest.mark.parametrize("output", ["| head -n 1", "> /dev/full", ">&-"])
def test_keys_and_help_print_no_traceback_with_a_closed_or_full_stdout(output: str) -> None:
    for command in ("keys", "shards --help", "eval --help", "--help"):
        done = shell(f"{sys.executable} -m resolute {command} {output}")
        assert done.returncode == (2 if "full" in output else 0)
        assert "Traceback" not in done.stderr


def test_an_error_with_a_closed_stderr_gives_status_2() -> None:
    assert shell(f"{sys.executable} -m resolute shards --src gone --out gone 2>&-").returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_file_names_are_utf8_in_every_locale(photos: Path, tmp_path: Path, locale: dict[str, str]) -> None:
    folder = tmp_path / "größe"
    folder.mkdir()
    (photos / "class1" / "müd.jpg").write_bytes((photos / "class1" / "001.jpg").read_bytes() + b"\0")
    (folder / "välid.txt").write_text("class1/müd.jpg\nclass0/002.jpg\n")
    sets = []
    for name, environment in (("a", {"PYTHONUTF8": "1"}), ("b", locale)):
        out = folder / name
        done = shell(
            f"{sys.executable} -m resolute shards --src {photos} --val-list {folder}/välid.txt --out {out} --res 32 "
            "--workers 1",
            **environment,
        )
        assert done.returncode == 0, done.stderr
        assert f"{out}: 19 images" in done.stdout
        sets.append(tree(out))
    assert sets[0] == sets[1]
