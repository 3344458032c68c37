"""Each benchmark program once on tiny data: its result is complete and has no absolute path, its mistakes are one line.

`gpu-check` is in test_gpu_check.py, `whole` in test_whole.py.
"""

from __future__ import annotations

import importlib
import json
import platform
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from resolute.benchmarks import brief, change, loader, record
from resolute.benchmarks.loader import SAME_DB
from resolute.benchmarks.loaders import run as loaders
from resolute.benchmarks.loaders.registry import LOADERS
from resolute.benchmarks.record import RESULTS, check_writable, commit, digest, results_page
from resolute.benchmarks.setting import default_file
from resolute.benchmarks.storage.__main__ import main as storage
from resolute.benchmarks.training.__main__ import main as training
from resolute.benchmarks.training.summary import main as show
from resolute.benchmarks.training.summary import summary, tables
from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from tests.benchmarks.test_training import tiny
from tests.conftest import RESOLUTIONS, make_photos
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
def test_bench_measures_all_and_ends_with_the_sentence(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.html"
    words = texts("--shards", shard_root, "--seconds", 1, "--batch-size", 8, "--model", "test_resnet", "--out", out)
    assert main(["bench", *words, *CPU]) == 0
    text = (tmp_path / "bench.json").read_text()
    result = json.loads(text)
    assert [entry["res"] for entry in result["loader"]["res"]] == list(RESOLUTIONS)
    assert all(set(entry["loaders"]) == {"ours", "pillow"} for entry in result["loader"]["res"])
    assert list(map(int, result["model"])) == list(RESOLUTIONS)
    for runs in result["steps"]["step_s"].values():
        assert [len(own) for own in runs] == [len(runs[0])] * 3
        assert len(runs[0]) >= 2 * change.first_batches(1) + 1
    *_, sentence, page = capsys.readouterr().out.splitlines()
    assert (sentence, page) == (brief.sentence(result), str(out))
    assert_anonymous(text, shard_root.parent)
    assert out.read_bytes() == brief.page(result)


@pytest.mark.slow
def test_bench_all_measures_every_part_resolution_and_loader_in_rounds(
    shard_root: Path, shard_set: ShardSet, tmp_path: Path
) -> None:
    words = texts(
        "--shards",
        shard_root,
        "--out",
        tmp_path / "r.json",
        "--seconds",
        0.02,
        "--rounds",
        2,
        "--res",
        "32,64",
        "--batch-size",
        8,
        *CPU,
    )
    assert bench(words) == 0
    text = (tmp_path / "r.json").read_text()
    assert_anonymous(text, shard_root.parent)
    result = json.loads(text)
    assert [entry["res"] for entry in result["loader"]["res"]] == [32, 64]
    assert all(set(entry["loaders"]) == {"ours", "pillow"} for entry in result["loader"]["res"])
    assert [entry["res"] for entry in result["training"]["res"]] == [32, 64]
    assert all(set(entry["images_per_s"]) == {"live", "cached", "synthetic"} for entry in result["training"]["res"])
    for consumer in result["change"]["consumers"].values():
        assert [(c["from_res"], c["to_res"]) for c in consumer["changes"]] == [(32, 64)]
        for runs in consumer["batch_s"].values():
            assert [[len(stage) >= 30 for stage in run] for run in runs] == [[True] * 2] * 2
    summaries = [value for value in walk(result) if isinstance(value, dict) and "raw" in value]
    assert all(each["median"] == statistics.median(each["raw"]) and len(each["raw"]) == 2 for each in summaries)
    assert (result["shards"]["hash"], result["shards"]["train_samples"]) == (shard_set.hash, 75)
    assert (result["commit"], result["rounds"], result["settings"]["batch_size"]) == (commit(), 2, 8)
    assert result["command"].startswith("resolute bench-all --shards ")


def test_bench_all_runs_only_the_requested_parts_and_names_the_result_after_the_device(
    shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = texts(
        "--shards",
        shard_root,
        "--only",
        "loader",
        "--res",
        32,
        "--seconds",
        0.02,
        "--rounds",
        1,
        "--batch-size",
        8,
        *CPU,
    )
    assert bench(words) == 0
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")] == ["bench/bench-cpu.json"]
    result = json.loads((tmp_path / "bench/bench-cpu.json").read_text())
    assert {"loader", "change", "training"} & set(result) == {"loader"}
    assert "  32 px  ours" in capsys.readouterr().out
    assert str(default_file("bench", "NVIDIA H200 NVL")) == "bench/bench-h200-nvl.json"


@pytest.mark.slow
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
    assert LOADERS["pillow"].resize in printed


@pytest.mark.slow
def test_change_measures_changes_of_resolution_and_every_other_kind(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaders, "Runner", partial(loaders.Runner, isolated=False))  # which saves interpreters
    out = tmp_path / "changes.json"
    words = texts("--shards", shard_root, *TINY, "--out", out)
    assert change.main([*words, "--only", "ours", "--res", "32,64", "--batches", "15"]) == 0
    assert set(json.loads(out.read_text())["change"]["consumers"]) == {"drained", "paced"}
    assert change.main([*words, "--kinds"]) == 0
    result = json.loads(out.read_text())
    kinds = {each["kind"] for each in result["changes"]}
    assert len(kinds) == 14
    for kind in (
        "epoch to epoch",
        "training to validation",
        "augmentation on",
        "order, shuffled to windowed",
        "all at once",
    ):
        assert kind in kinds
    printed = capsys.readouterr().out
    assert all(kind in printed for kind in kinds)
    assert all(wait >= 0 for wait in result["waits_s"][0])


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_training_trains_and_writes_a_result_and_charts(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], forked: Callable[..., Ended]
) -> None:
    def train(words: Sequence[str]) -> None:
        assert forked("resolute", *words).status == 0

    recipe = tiny(tmp_path, "steps", [(32, 1), (48, 1)])
    words = texts(
        "--shards",
        shard_root,
        "--recipes",
        recipe,
        "--seeds",
        1,
        *CPU,
        "--out",
        tmp_path / "o.json",
        "--charts",
        tmp_path / "p.html",
    )
    assert training(words, run=train) == 0
    text, out = (tmp_path / "o.json").read_text(), capsys.readouterr().out
    assert_anonymous(text, tmp_path, shard_root.parent)
    result = json.loads(text)
    (run,) = result["runs"]
    assert [stage["res"] for stage in run["stages"]] == [epoch["res"] for epoch in run["epochs"]] == [32, 48]
    assert run["wall_s"] > run["elapsed_s"] == pytest.approx(run["train_s"] + run["eval_s"])
    assert [point["top1"] for point in run["curve"]] == [epoch["top1"] for epoch in run["epochs"]]
    assert result["summary"] == summary(result["runs"])
    assert tables(result) in out
    assert "Training loss" in (tmp_path / "p.html").read_text()
    assert show([str(tmp_path / "o.json"), "--charts", str(tmp_path / "q.html")]) == 0
    assert tables(result) in capsys.readouterr().out
    assert (tmp_path / "q.html").read_text() == (tmp_path / "p.html").read_text()


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        ("bench", ["--out", "page.pdf"], "page.pdf, expected a name that ends in .html"),
        ("bench", ["--model", "nosuch"], "--model: got 'nosuch', expected a timm model"),
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


def test_the_results_page_is_up_to_date() -> None:
    """Run `python -m resolute.benchmarks.record` after adding or removing a result."""
    assert (RESULTS / "README.md").read_text() == results_page(RESULTS)


# Measured before results had a digest; a renewal takes its file out of this list.
WITHOUT_DIGEST = {
    "bench-cpu",
    "changes-xeon",
    "finetune-clothing",
    "finetune-imagenette",
    "gpu-check-h200",
    "half-clothing",
    "half-imagenette",
    "half-imagenette-more",
    "imagenette-board",
    "imagenette-board-20",
    "imagenette-networks",
    "imagenette-small",
    "imagenette-small-seeds",
    "imagenette-small-sgd",
    "imagenette-whole",
    "imagenette-whole-seeds",
    "lr-find-sweeps",
    "near_copies",
    "peers",
    "peers-switch",
    "prep",
    "resume",
    "siblings",
    "soak",
    "soak-train-all",
    "storage-tars",
    "techniques",
    "whole",
    "whole-large",
    "whole-tuning",
}


def test_no_result_file_has_been_edited() -> None:
    files = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")}
    assert {name for name, result in files.items() if "digest" not in result} == WITHOUT_DIGEST
    for name, result in files.items():
        if "digest" in result:
            assert result["digest"] == digest(result), name
            assert re.fullmatch("[0-9a-f]{12}", result["commit"]), name


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
