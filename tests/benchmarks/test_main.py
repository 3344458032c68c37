"""The benchmark command, end to end on a tiny set: complete results without host names and paths."""

from __future__ import annotations

import json
import platform
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from resolute.benchmarks import at_length
from resolute.benchmarks.record import commit
from resolute.benchmarks.setting import default_file
from resolute.pipeline.dataset.shard_set import ShardSet
from tests.conftest import RESOLUTIONS
from tests.support.cli import bench


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """The training part sets torch's threads, as a training run does."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def words(shard_root: Path, out: Path, *more: str) -> list[str]:
    # why one thread: OpenMP threads spin while waiting, which takes seconds per step on a busy machine
    return ["--shards", str(shard_root), "--out", str(out), "--seconds", "0.02", "--rounds", "2", "--threads", "1",
            "--batch-size", "8", "--device", "cpu", *more]  # fmt: skip


def walk(value: Any) -> Iterator[Any]:
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(inner)


@pytest.fixture(scope="module")
def ran(shard_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The result file of a run of all parts, as it is on disk, and as text."""
    out = tmp_path_factory.mktemp("bench") / "result.json"
    assert bench(words(shard_root, out)) == 0
    assert [path.name for path in out.parent.iterdir()] == ["result.json"]
    return json.loads(out.read_text()), out.read_text()


@pytest.mark.slow
def test_every_part_measures_every_resolution_and_loader(ran: tuple[dict[str, Any], str]) -> None:
    result, _ = ran
    assert [entry["res"] for entry in result["loader"]["res"]] == list(RESOLUTIONS)
    assert all(set(entry["loaders"]) == {"ours", "pillow"} for entry in result["loader"]["res"])
    assert [entry["res"] for entry in result["training"]["res"]] == list(RESOLUTIONS)
    assert all(set(entry["images_per_s"]) == {"live", "cached", "synthetic"} for entry in result["training"]["res"])
    for consumer in result["change"]["consumers"].values():
        assert [(c["from_res"], c["to_res"]) for c in consumer["changes"]] == [(32, 48), (48, 64)]
        for runs in consumer["batch_s"].values():
            assert [[len(stage) >= 30 for stage in run] for run in runs] == [[True] * 3] * 2


def test_every_round_is_kept_with_its_median(ran: tuple[dict[str, Any], str]) -> None:
    summaries = [value for value in walk(ran[0]) if isinstance(value, dict) and "raw" in value]
    assert len(summaries) == 3 * 2 * 6 + 2 * 2 * 2 * 5 + 3 * 5  # loader, change, training
    for summary in summaries:
        assert len(summary["raw"]) == 2
        assert summary["median"] == statistics.median(summary["raw"])


def test_results_record_machine_versions_and_settings(ran: tuple[dict[str, Any], str], shard_set: ShardSet) -> None:
    result, _ = ran
    assert result["shards"]["hash"] == shard_set.hash
    assert result["shards"]["train_samples"] == 75
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["ram_gib"] > 0
    assert result["machine"]["cpu"]
    assert {"python", "torch", "timm", "nvidia-dali", "numpy"} <= set(result["versions"])
    assert result["settings"]["batch_size"] == 8
    assert result["commit"] == commit()
    assert result["rounds"] == 2
    assert result["command"].startswith("resolute bench-all --shards ")


def test_results_contain_no_absolute_path_or_host_name(ran: tuple[dict[str, Any], str], shard_root: Path) -> None:
    result, text = ran
    assert str(shard_root.parent) not in text
    assert not re.search(r'"/\w', text)
    assert platform.node() not in {value for value in walk(result) if isinstance(value, str)}


def test_only_the_requested_parts_run_and_are_printed(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(words(shard_root, tmp_path / "r.json", "--only", "loader", "--rounds", "1")) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert set(result) & set(at_length.PARTS) == {"loader"}
    printed = capsys.readouterr()
    assert printed.err == ""
    for res in RESOLUTIONS:
        assert len(re.findall(rf"^  {res} px +(?:ours|torch DataLoader, Pillow) ", printed.out, re.MULTILINE)) == 2


def test_a_default_result_is_named_after_the_device(
    shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = words(shard_root, tmp_path, "--only", "loader", "--rounds", "1")
    del arguments[2:4]
    assert bench(arguments) == 0
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")] == ["bench/bench-cpu.json"]
    assert str(default_file("bench", "NVIDIA H200 NVL")) == "bench/bench-h200-nvl.json"


def test_help_names_every_part_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["--help"]) == 0
    text = "".join(capsys.readouterr().out.split())
    for word in (*at_length.PARTS, "--shards", "--model", "resnet10t", "default: 5.0", "default: 64,"):
        assert word.replace(" ", "") in text.replace("\u2502", "")


@pytest.mark.gpu
def test_the_command_runs_on_a_gpu(shard_root: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    assert bench([*words(shard_root, out), "--device", "cuda"]) == 0
    result = json.loads(out.read_text())
    assert result["machine"]["gpu"]
    assert all(set(entry["loaders"]) == {"ours", "pillow"} for entry in result["loader"]["res"])
