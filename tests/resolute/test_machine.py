"""The default number of threads respects the affinity mask and the cgroup quota."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from resolute.machine import available_cpus, cpus_per_process
from tests import ROOT


@pytest.mark.parametrize(
    ("membership", "files", "cpus"),
    [
        ("", {}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/pod/box\n", {"pod/cpu.max": "200000 100000", "pod/box/cpu.max": "max 100000"}, 2),
        (
            "4:cpu,cpuacct:/docker\n2:memory:/x\n",
            {"cpu/docker/cpu.cfs_quota_us": "50000\n", "cpu/docker/cpu.cfs_period_us": "100000\n"},
            1,
        ),
    ],
    ids=["affinity", "no quota", "quota of a parent group", "version 1"],
)
def test_affinity_and_cgroup_quotas_bound_the_number_of_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, files: dict[str, str], cpus: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "self").write_text(membership)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    assert available_cpus(cgroup=tmp_path / "fs", membership=tmp_path / "self") == cpus


@pytest.mark.parametrize(
    ("environment", "cpus"),
    [
        ({}, 24),
        ({"LOCAL_WORLD_SIZE": "4"}, 6),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 3),
        ({"MPI_LOCALNRANKS": "2"}, 12),
        ({"MV2_COMM_WORLD_LOCAL_SIZE": "3"}, 8),
        ({"LOCAL_WORLD_SIZE": "48"}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 24),
        ({"LOCAL_WORLD_SIZE": ""}, 24),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 6),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, 6),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NTASKS_PER_NODE": "8"}, 24),
        ({"SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_ON_NODE": "96"}, 24),  # bound to 24 of its own
        ({"SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "5"}, 5),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "LOCAL_WORLD_SIZE": "8"}, 3),  # torchrun in a job
    ],
)
def test_the_processes_that_a_launcher_starts_share_the_cpus(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], cpus: int
) -> None:
    monkeypatch.setattr("resolute.machine.available_cpus", lambda: 24)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "MPI_", "MV2_", "LOCAL_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cpus_per_process() == cpus


def test_default_thread_counts_respect_the_affinity_mask() -> None:
    few = {min(os.sched_getaffinity(0))}
    done = subprocess.run(
        [sys.executable, "-m", "resolute", "train", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, few),
    )
    text = " ".join(done.stdout.replace("│", " ").split())
    assert re.search(r"--threads \w+ [^-]*?(default: |all cores, )1\)", text), text
