"""Each benchmark program once on tiny data: its result is complete and has no absolute path, its mistakes are one line.

`whole` is in test_whole.py, `bench-all` in test_publish.py.
"""

from __future__ import annotations

import importlib
import json
import platform
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from resolute.benchmarks import bench as program
from resolute.benchmarks import change, loader, record
from resolute.benchmarks.cli import default_file
from resolute.benchmarks.loader import SAME_DB
from resolute.benchmarks.loaders import run as loaders
from resolute.benchmarks.loaders.registry import LOADERS
from resolute.benchmarks.record import RESULTS, check_writable, commit, digest
from resolute.benchmarks.storage.__main__ import main as storage
from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from tests.conftest import make_photos
from tests.support.cli import bench
from tests.support.commands import Ended

CPU = ("--device", "cpu", "--threads", "1")
TINY = ("--batch-size", "8", "--rounds", "1", "--workers", "1")


def texts(*words: object) -> list[str]:
    return [str(word) for word in words]


def walk(value: Any) -> Iterator[Any]:
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(inner)


def assert_anonymous(text: str, *folders: Path) -> None:
    """A result names no folder of this machine, nor the machine."""
    assert [folder for folder in folders if str(folder) in text] == []
    values = {value for value in walk(json.loads(text)) if isinstance(value, str)}
    assert not any(value.startswith("/") or value == platform.node() for value in values)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
def test_bench_measures_every_part_resolution_and_loader_in_rounds_and_ends_with_the_sentence(
    shard_root: Path, shard_set: ShardSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.html"
    words = texts("--shards", shard_root, "--seconds", 1, "--rounds", 2, "--batch-size", 8, "--model", "test_resnet")
    assert bench([*words, "--res", "32,64", "--out", str(out), *CPU]) == 0
    text = (tmp_path / "bench.json").read_text()
    assert_anonymous(text, shard_root.parent)
    result = json.loads(text)
    peer, tried = result["peer"]["loader"], result["peer"]["tried"]
    assert tried[peer] == max(tried.values())
    for part in ("loader", "training"):
        assert [entry["res"] for entry in result[part]["res"]] == [32, 64]
        assert all(set(entry["loaders"]) == {"ours", peer} for entry in result[part]["res"])
    assert set(result["change"]["step_s"]) == {"ours", peer, "v2"}
    for runs in result["change"]["step_s"].values():
        assert len(runs) == 2
        assert {len(own) for run in runs for own in run} == {len(runs[0][0])}
        assert len(runs[0][0]) >= 2 * change.first_batches(1) + 1
    summaries = [value for value in walk(result) if isinstance(value, dict) and "raw" in value]
    several = [each for each in summaries if len(each["raw"]) == 2]
    assert len(several) > len(summaries) / 2
    assert all(each["median"] == statistics.median(each["raw"]) for each in summaries)
    assert (result["shards"]["hash"], result["shards"]["train_samples"]) == (shard_set.hash, 75)
    assert (result["commit"], result["rounds"], result["settings"]["batch_size"]) == (commit(), 2, 8)
    assert result["command"].startswith("resolute bench --shards ")
    *_, sentence, page = capsys.readouterr().out.splitlines()
    assert (sentence, page) == (program.sentence(result), str(out))
    assert out.read_bytes() == program.page(result)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
def test_bench_measures_only_the_requested_parts_and_writes_below_the_folder_bench(
    shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = texts("--shards", shard_root, "--parts", "loader", "--res", 32, "--seconds", 0.2, "--batch-size", 8, *CPU)
    assert bench(words) == 0
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")) == [
        "bench/bench.html",
        "bench/bench.json",
    ]
    result = json.loads((tmp_path / "bench/bench.json").read_text())
    assert {"loader", "change", "training"} & set(result) == {"loader"}
    assert "Loaders alone, images/s" in capsys.readouterr().out


def test_a_result_of_a_gpu_is_named_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(default_file("gpu", "NVIDIA H200 NVL")) == "bench/gpu-h200-nvl.json"


@pytest.mark.nightly
def test_loader_measures_rates_and_pixels_in_processes(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "loader.json"
    words = texts("--shards", shard_root, *TINY, "--only", "pillow", "--res", 32, "--seconds", 0.1, "--out", out)
    assert loader.main(words) == 0
    text, printed = out.read_text(), capsys.readouterr().out
    assert_anonymous(text, shard_root.parent)
    result = json.loads(text)
    (entry,) = result["loader"]["res"]
    values = entry["loaders"]["pillow"]
    assert set(values["tried"]) == {"1", "2"}
    assert values["processes"] == 1 + values["workers"]
    assert 0 < values["cores_busy"]["median"] < 2.5
    assert values["images_per_s"]["median"] > 0
    assert [each["psnr_db"] for each in result["quality"]] == [{"pillow": SAME_DB}] * 2
    assert LOADERS["pillow"].title in printed


@pytest.mark.slow
def test_change_measures_changes_of_resolution_for_both_consumers(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaders, "Runner", partial(loaders.Runner, isolated=False))  # which saves interpreters
    out = tmp_path / "changes.json"
    words = texts(shard_root, *TINY, "--out", out, "--only", "ours", "--res", "32,64", "--batches", 15)
    assert change.main(words) == 0
    consumers = json.loads(out.read_text())["change"]["consumers"]
    assert set(consumers) == {"drained", "paced"}
    for consumer in consumers.values():
        assert [(each["from_res"], each["to_res"]) for each in consumer["changes"]] == [(32, 64)]
        assert [[len(stage) >= 15 for stage in run] for run in consumer["batch_s"]["ours"]] == [[True] * 2]
    assert capsys.readouterr().out.count("32 -> 64 px") == 2


@pytest.mark.slow
def test_storage_measures_a_cold_disk_and_a_store(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = texts(
        "--shards",
        shard_root,
        "--res",
        32,
        "--pace",
        400,
        "--seconds",
        0.1,
        "--batch-size",
        8,
        "--latency-ms",
        1,
        "--only",
        "cold,store",
        "--out",
        tmp_path / "s.json",
    )
    assert storage(words) == 0
    text = (tmp_path / "s.json").read_text()
    assert_anonymous(text, shard_root.parent)
    rows = json.loads(text)["rows"]
    assert [(row["name"], row["order"]) for row in rows] == [
        ("cold disk", "shuffled"),
        ("cold disk", "windowed"),
        *(("store, empty cache", order) for order in ("shuffled", "windowed")),
    ]
    for row in rows:
        assert len(row["epochs"]) == 2
        assert all(0 <= epoch["stall_frac"] < 1 for epoch in row["epochs"])
    assert "a consumer that computes" in capsys.readouterr().out


@pytest.mark.nightly
def test_prep_is_measured_beside_other_converters(tmp_path: Path, forked: Callable[..., Ended]) -> None:
    """In a process, which waits for all its children."""
    photos = make_photos(tmp_path / "photos", each=15)
    words = texts("--src", photos, "--res", "32,48", "--rounds", 1, "--copies", 2, "--out", tmp_path / "p.json")
    done = forked("resolute.benchmarks.prep", *words)
    assert done.status == 0, done.err
    assert "prep with nothing to do" in done.out
    text = (tmp_path / "p.json").read_text()
    assert_anonymous(text, tmp_path)
    result = json.loads(text)
    assert (result["images"], result["resolutions"]) == (90, [32, 48])
    assert set(result["seconds"]) == {"prep", "pillow + ShardWriter", "pillow, bicubic"}
    assert all(len(values["seconds"]) == 1 for values in result["seconds"].values())
    assert all(value > 40 for value in result["psnr_db"]["bicubic"].values())


@pytest.mark.nightly
def test_planted_copies_are_found_and_the_cost_is_measured(tmp_path: Path, forked: Callable[..., Ended]) -> None:
    """In a process, which waits for all its children."""
    photos = make_photos(tmp_path / "photos", classes=2, each=6)
    words = texts("--src", photos, "--photos", 2, "--search", 200, "--rounds", 1, "--out", tmp_path / "n.json")
    done = forked("resolute.benchmarks.near_copies", *words)
    assert done.status == 0, done.err
    assert "prep of photos, cpu_seconds" in done.out
    text = (tmp_path / "n.json").read_text()
    assert_anonymous(text, tmp_path)
    result = json.loads(text)
    assert (result["sources"], result["planted_photos"], result["search"]["photos"]) == ({"photos": 12}, 2, 200)
    assert result["kinds"]["half size"]["recognised"][0] == result["kinds"]["half size"]["copies"] == 2
    assert {name: len(values["seconds"]) for name, values in result["prep"]["photos"].items()} == {"find": 1, "none": 1}


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        ("bench", ["--out", "page.pdf"], "page.pdf, expected a name that ends in .html"),
        ("bench", ["--model", "nosuch"], "--model: got 'nosuch', expected a timm model"),
        ("bench", ["--parts", "stalls"], "--parts: got stalls, expected some of loader,training,change"),
        ("bench", ["--res", "32"], "got one resolution, expected two or more for the cost of a change"),
        ("loader", ["--only", "nvjpeg"], "--only: got nvjpeg, expected some of ours,pillow"),
        ("loader", ["--res", "128"], "expected some of 32,48,64"),
        ("change", ["--batches", "3"], "--batches: got 3, expected at least"),
        ("storage.__main__", ["--only", "tape"], "--only: got tape, expected some of local,cold,store"),
        ("storage.__main__", ["--pace", "0"], "--pace: got '0', expected number, above 0"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    shard_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: str,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if module == "bench":
        assert main(["bench", "--shards", str(shard_root), "--device", "cpu", *words]) == 2
    else:
        program = importlib.import_module(f"resolute.benchmarks.{module}").main
        assert program(["--shards", str(shard_root), *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_result_is_sealed_and_an_edit_is_seen(tmp_path: Path) -> None:
    record.write(tmp_path / "x.json", {"runs": {16: [1.5, 2.0], 128: (3,)}, "machine": {"cores": 2}}, quiet=True)
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["machine"].keys() == {"cores", "load_after"}
    assert result["digest"] == digest(result)
    result["runs"]["16"][1] = 1.9
    assert result["digest"] != digest(result)


def test_a_published_result_needs_a_commit_without_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(record, "commit", lambda: "0123456789ab-dirty")
    check_writable(tmp_path / "x.json")
    with pytest.raises(ResoluteError, match="with the code at 0123456789ab-dirty, expected a commit without changes"):
        check_writable(RESULTS / "x.json")
    monkeypatch.setattr(record, "commit", lambda: "0123456789ab")
    check_writable(RESULTS / "x.json")
