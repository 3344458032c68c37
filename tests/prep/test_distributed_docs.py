"""The scripts of docs/distributed_prep.md run as they are, with stand-ins for the schedulers, and make the same set."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.conftest import make_photos
from tests.support.trees import tree

Prep = Callable[..., Any]
DOCS = (ROOT / "docs" / "distributed_prep.md").read_text()
SHARDS, PER_JOB = 7, 4
# Run the array of a script, as Slurm does, and a wrapped command; each prints a job's number.
SBATCH = """#!/bin/bash
set -e
for last; do :; done
if [ "$1" = --parsable ]; then
  for SLURM_ARRAY_TASK_ID in 1 0; do SLURM_ARRAY_TASK_ID=$SLURM_ARRAY_TASK_ID bash "$last" >&2; done
else
  [ "$1" = --dependency=afterok:17 ] && [ "$2" = --wrap ] && bash -c "$last" >&2
fi
echo 17
"""


def blocks(language: str) -> list[str]:
    """The code blocks of the page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", DOCS, re.DOTALL)


@pytest.fixture
def local(tmp_path: Path) -> Callable[[str], str]:
    """local(script): the script with the paths and numbers of this test."""
    make_photos(tmp_path / "photos", classes=2, each=14)

    def replace(script: str) -> str:
        for old, new in (
            ("/shared/photos", f"{tmp_path}/photos"), ("/shared/set", f"{tmp_path}/set"),
            ("s3://bucket/set", f"{tmp_path}/set"), ("128,160,224", "32,48 --shard-samples 4 --val-frac 0"),
            ("* 50", f"* {PER_JOB}"), ("+ 50", f"+ {PER_JOB}"),
        ):  # fmt: skip
            script = script.replace(old, new)
        return script

    return replace


@pytest.fixture
def bash(tmp_path: Path) -> Callable[..., None]:
    """bash(script, NAME=value): run a script in which `resolute`, `srun` and `sbatch` are stand-ins."""
    command = f'#!/bin/bash\nexec {sys.executable} -m resolute "$@"\n'
    stand_ins = {"resolute": command, "srun": '#!/bin/bash\nexec "$@"\n'}
    for name, text in {**stand_ins, "sbatch": SBATCH}.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(script: str, **variables: str) -> None:
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        environ = {**os.environ, **variables, "PATH": path, "PYTHONPATH": str(ROOT)}
        words = ["bash", "-c", script]
        done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return run


@pytest.fixture
def fresh(tmp_path: Path, prep: Prep) -> Callable[[], dict[str, str]]:
    """fresh(): the files of the set that a single prep makes."""

    def make() -> dict[str, str]:
        argv = ("--src", tmp_path / "photos", "--res", "32,48", "--shard-samples", 4, "--val-frac", 0)
        assert prep(*argv, "--out", tmp_path / "fresh").status == 0
        return tree(tmp_path / "fresh")

    return make


def test_every_script_is_valid_bash() -> None:
    scripts = blocks("bash")
    assert len(scripts) == 5
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), script


@pytest.mark.slow
def test_the_slurm_scripts_make_the_set_of_a_single_prep(
    tmp_path: Path, local: Callable[[str], str], bash: Callable[..., None], fresh: Callable[[], dict[str, str]]
) -> None:
    array, commands = blocks("bash")[:2]
    assert "#SBATCH --array=0-19 " in array
    (tmp_path / "shards.sh").write_text(local(array))
    bash(local(commands))
    assert tree(tmp_path / "set") == fresh()


@pytest.mark.slow
def test_the_kubernetes_job_makes_the_set_of_a_single_prep(
    tmp_path: Path, local: Callable[[str], str], bash: Callable[..., None], fresh: Callable[[], dict[str, str]]
) -> None:
    yaml = pytest.importorskip("yaml", reason="the optional package PyYAML is not installed")
    (text,) = blocks("yaml")
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 20
    (container,) = job["spec"]["template"]["spec"]["containers"]
    shell, flag, script = container["command"]
    assert (shell, flag) == ("bash", "-c")
    bash(local(blocks("bash")[1]).splitlines()[1])
    for index in range(-(-SHARDS // PER_JOB)):
        bash(local(script), JOB_COMPLETION_INDEX=str(index))
    bash(f"resolute jobs finish --out {tmp_path}/set")
    assert tree(tmp_path / "set") == fresh()


@pytest.mark.slow
def test_the_ray_commands_make_the_set_of_a_single_prep(
    tmp_path: Path, local: Callable[[str], str], bash: Callable[..., None], fresh: Callable[[], dict[str, str]]
) -> None:
    pytest.importorskip("ray", reason="the optional package ray is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    head, node, command = (local(script).strip() for script in blocks("bash")[2:])
    assert "--port=6379" in head
    # why a token: a cluster accepts tasks from anyone who reaches it; why its own: no other cluster is to be reached
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environ = {**os.environ, **token, "PATH": path, "PYTHONPATH": str(ROOT)}
    ray = tmp_path / "bin" / "ray"
    ray.write_text(f'#!/bin/bash\nexec {sys.executable} -m ray.scripts.scripts "$@" --block --num-cpus=1\n')
    ray.chmod(0o755)

    def start(script: str) -> subprocess.Popen[bytes]:
        words = ["bash", "-c", f"exec {script}"]
        return subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    started = [start(f"{head.replace('6379', port)} --node-ip-address=127.0.0.1 --include-dashboard=false")]
    try:
        bash(f"for i in $(seq 60); do (: < /dev/tcp/127.0.0.1/{port}) 2>/dev/null && exit; sleep 1; done; exit 1")
        started.append(start(node.replace("head:6379", f"127.0.0.1:{port}")))
        bash(command.replace("head:6379", f"127.0.0.1:{port}"), **token)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
    assert tree(tmp_path / "set") == fresh()
