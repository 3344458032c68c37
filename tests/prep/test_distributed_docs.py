"""The scripts of docs/distributed_prep.md run as they are, with stand-ins for the schedulers, and make the same set."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.conftest import make_photos
from tests.support.cli import prep as main
from tests.support.trees import tree

Prep = Callable[..., Any]
DOCS = (ROOT / "docs" / "distributed_prep.md").read_text()
SHARDS, PER_JOB = 7, 4
OPTIONS = ("--res", "32,48", "--shard-samples", 4, "--val-frac", 0)
STAND_INS = {
    "resolute": f'exec {sys.executable} -m resolute "$@"\n',
    "srun": 'exec "$@"\n',
    # Runs the array of a script, as Slurm does, and a wrapped command; each prints a job's number.
    "sbatch": """set -e
for last; do :; done
if [ "$1" = --parsable ]; then
  for SLURM_ARRAY_TASK_ID in 1 0; do SLURM_ARRAY_TASK_ID=$SLURM_ARRAY_TASK_ID bash "$last" >&2; done
else
  [ "$1" = --dependency=afterok:17 ] && [ "$2" = --wrap ] && bash -c "$last" >&2
fi
echo 17
""",
}


def blocks(language: str) -> list[str]:
    """The code blocks of the page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", DOCS, re.DOTALL)


class Shell:
    """A folder in which the page's scripts run, with photos, and the stand-ins on the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_photos(folder / "photos", classes=2, each=14)
        (folder / "bin").mkdir()
        for name, text in STAND_INS.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}")
            (folder / "bin" / name).chmod(0o755)

    def local(self, script: str) -> str:
        """The script with the paths and numbers of this test."""
        for old, new in (
            ("/shared/photos", f"{self.folder}/photos"),
            ("/shared/set", f"{self.folder}/set"),
            ("s3://bucket/set", f"{self.folder}/set"),
            ("128,160,224", "32,48 --shard-samples 4 --val-frac 0"),
            ("* 50", f"* {PER_JOB}"),
            ("+ 50", f"+ {PER_JOB}"),
        ):
            script = script.replace(old, new)
        return script

    def run(self, script: str, **variables: str) -> None:
        words = ["bash", "-c", self.local(script)]
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        environ = {**os.environ, **variables, "PATH": path, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, cwd=self.folder, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def check_set(shell: Shell, prep: Prep) -> None:
    """Check that the set is that of a single prep."""
    assert prep("--src", shell.folder / "photos", *OPTIONS, "--out", shell.folder / "fresh").status == 0
    assert tree(shell.folder / "set") == tree(shell.folder / "fresh")


def test_every_script_is_valid_bash() -> None:
    scripts = blocks("bash")
    assert len(scripts) == 5
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), script


@pytest.mark.slow
def test_the_slurm_scripts_make_the_set_of_a_single_prep(shell: Shell, prep: Prep) -> None:
    array, commands = blocks("bash")[:2]
    assert "#SBATCH --array=0-19 " in array
    (shell.folder / "shards.sh").write_text(shell.local(array))
    shell.run(commands)
    check_set(shell, prep)


@pytest.mark.slow
def test_the_kubernetes_job_makes_the_set_of_a_single_prep(shell: Shell, prep: Prep) -> None:
    yaml = pytest.importorskip("yaml", reason="the optional package PyYAML is not installed")
    (text,) = blocks("yaml")
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"], job["spec"]["completionMode"]) == ("batch/v1", "Job", "Indexed")
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 20
    (container,) = job["spec"]["template"]["spec"]["containers"]
    *words, script = container["command"]
    assert words == ["bash", "-c"]
    assert main(["plan", "--src", shell.folder / "photos", *OPTIONS, "--out", shell.folder / "set"]) == 0
    for index in range(-(-SHARDS // PER_JOB)):
        shell.run(script, JOB_COMPLETION_INDEX=str(index))
    assert main(["finish", "--out", shell.folder / "set"]) == 0
    check_set(shell, prep)


@pytest.mark.slow
def test_the_ray_command_asks_for_its_cluster(shell: Shell, prep: Prep) -> None:
    """tests/prep/run/test_ray.py has clusters."""
    pytest.importorskip("ray", reason="the optional package ray is not installed")
    words = shell.local(blocks("bash")[4]).replace("head:6379", "127.0.0.1:1").split()
    ran = prep(*words[2:])
    assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
    assert "RAY_ADDRESS: no cluster at 127.0.0.1:1" in ran.err
