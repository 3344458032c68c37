"""The default number of threads knows the affinity mask and the container's quota."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cpu_count import available_cpus
from tests import ROOT


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def count(tmp_path: Path, membership: str, files: dict[str, str]) -> int:
    (tmp_path / "self").write_text(membership)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    return available_cpus(cgroup=tmp_path / "fs", membership=tmp_path / "self")


def test_affinity_counts(tmp_path: Path) -> None:
    assert count(tmp_path, "", {}) == 8
    assert count(tmp_path, "0::/\n", {"cpu.max": "max 100000\n"}) == 8


def test_the_quota_of_a_container_counts(tmp_path: Path) -> None:
    assert count(tmp_path, "0::/\n", {"cpu.max": "250000 100000\n"}) == 3


def test_the_quota_of_a_parent_group_counts(tmp_path: Path) -> None:
    assert count(tmp_path, "0::/pod/box\n", {"pod/cpu.max": "200000 100000", "pod/box/cpu.max": "max 100000"}) == 2


def test_version_1_quotas_count(tmp_path: Path) -> None:
    files = {"cpu/docker/cpu.cfs_quota_us": "50000\n", "cpu/docker/cpu.cfs_period_us": "100000\n"}
    assert count(tmp_path, "4:cpu,cpuacct:/docker\n2:memory:/x\n", files) == 1
    assert count(tmp_path, "4:cpu:/docker\n", {"cpu/docker/cpu.cfs_quota_us": "-1\n"}) == 8


def test_nothing_else_counts_cores() -> None:
    files = [path for folder in ("pipeline", "prep", "train", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    others = [
        str(path.relative_to(ROOT))
        for path in [*files, ROOT / "Makefile"]
        if re.search(r"cpu_count\(\)|sched_getaffinity|\bnproc\b(?!-per)", path.read_text())
    ]
    assert others == ["pipeline/cpu_count.py"]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["train train", "train eval", "train predict", "benchmarks"])
def test_the_default_number_of_threads_is_what_the_process_may_use(module: str) -> None:
    few = {min(os.sched_getaffinity(0))}
    done = subprocess.run(
        [sys.executable, "-m", *module.split(), "--help"], cwd=ROOT, capture_output=True, text=True, check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, few),
    )  # fmt: skip
    text = " ".join(done.stdout.split())
    assert re.search(r"--threads \w+ [^-]*?(default: |all cores, )1\)", text), text
