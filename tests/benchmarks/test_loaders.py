"""Loader benchmark: every loader gets the same images and does the same work, and the figures are correct."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tarfile
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from resolute.benchmarks.loader import SAME_DB, main, measure_rates, psnr_db, quality_table, rates_table, reference
from resolute.benchmarks.loaders.dataloader import stored_images
from resolute.benchmarks.loaders.job import MEAN, STD, Job
from resolute.benchmarks.loaders.ours import full_batches, training_plan
from resolute.benchmarks.loaders.registry import LOADERS
from resolute.benchmarks.loaders.run import Runner, available
from resolute.benchmarks.loaders.tars import Tars, endless
from resolute.benchmarks.proc import cpu_time
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.reader import Reader
from resolute.pipeline.plan.stage import Augment
from tests.conftest import RESOLUTIONS

FFCV_PYTHON = os.environ.get("FFCV_PYTHON")
HERE = [name for name, loader in LOADERS.items() if loader.module != "ffcv"]
# torchvision 0.29 warns about its own decoder
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities:DeprecationWarning")
needs_ffcv = pytest.mark.skipif(not FFCV_PYTHON, reason="FFCV_PYTHON names no interpreter that has FFCV")


@pytest.fixture
def job(shard_root: Path, tmp_path: Path) -> Job:
    return Job(shards=str(shard_root), scratch=str(tmp_path), resolutions=(32, 64), batches=3, batch_size=8, workers=1)


def runner(job: Job, *loaders: str, rounds: int = 1) -> Runner:
    return Runner(job=job, loaders=loaders, rounds=rounds, ffcv_python=FFCV_PYTHON)


def stream(name: str, job: Job) -> Any:
    loader = LOADERS[name]
    module = importlib.import_module(f"resolute.benchmarks.loaders.{loader.module}")
    return closing(module.stream(replace(job, variant=loader.variant)))


@pytest.mark.parametrize("res", RESOLUTIONS)
def test_images_are_the_members_of_the_tars_in_order(shard_root: Path, res: int) -> None:
    tars, expected = Tars(shard_root, res), []
    for path in sorted((shard_root / str(res)).glob("train-*.tar")):
        with tarfile.open(path) as tar:
            expected += [tar.extractfile(member).read() for member in tar.getmembers()]  # type: ignore[union-attr]
    assert [tars.jpeg(i) for i in range(len(tars))] == expected[::2]
    assert tars.labels == [int(label) for label in expected[1::2]]
    assert tars.mean_bytes == pytest.approx(np.mean([len(jpeg) for jpeg in expected[::2]]))


def test_jpegs_by_index_equal_those_of_the_tars_and_of_the_reader(shard_set: ShardSet) -> None:
    tars, stored = Tars(shard_set.root, 48), stored_images(shard_set, 48)
    ids = np.arange(len(stored))
    assert [stored.jpeg(i) for i in ids] == [tars.jpeg(i) for i in ids]
    assert stored.labels == tars.labels
    with closing(Reader(shard_set)) as reader:
        read = reader.submit("train", 48, ids).result()
        assert not read.errors
        for i, jpeg in zip(ids, read.images, strict=True):
            assert jpeg.tobytes().startswith(stored.jpeg(i))


@pytest.mark.parametrize(("samples", "total"), [(7, 7), (7, 3), (7, 30), (1, 5)])
def test_an_endless_epoch_is_a_sequence_of_permutations(samples: int, total: int) -> None:
    order = list(itertools.islice(endless(samples, seed=1), total))
    assert len(order) == total
    for start in range(0, total - samples + 1, samples):
        assert sorted(order[start : start + samples]) == list(range(samples))
    assert len(set(order[: samples])) == min(samples, total)


def test_a_job_is_unchanged_by_serialisation(job: Job) -> None:
    assert Job.from_json(job.to_json()) == job
    assert Job.from_json(replace(job, scale=(0.1, 0.5), variant="x").to_json()) != job


def test_all_loaders_use_the_default_crop_and_flip(job: Job) -> None:
    default = Augment()
    assert (job.scale, job.ratio, job.flip_prob) == (default.scale, default.ratio, default.flip_prob)


@pytest.mark.parametrize("name", HERE)
def test_every_loader_delivers_the_same_kind_of_batches(job: Job, name: str) -> None:
    torch.manual_seed(0)
    with stream(name, job) as batches_of:
        batches = [batch.clone() for batch in batches_of]
    counts = {res: sum(batch.shape == (8, 3, res, res) for batch in batches) for res in job.resolutions}
    assert sum(counts.values()) == len(batches)
    assert all(count >= job.batches for count in counts.values())
    values = torch.cat([batch.flatten() for batch in batches])
    assert values.dtype == torch.float32
    # normalised, not twice and not in another range: these photos have means of 80 + 30 and 80 + 90 levels
    low, high = (-np.array(MEAN) / STD).min() - 0.02, ((1 - np.array(MEAN)) / STD).max() + 0.02
    assert low <= values.min()
    assert values.max() <= high
    assert -1.2 < values.mean() < 0.2
    assert 0.4 < values.std() < 1.3


@pytest.mark.parametrize("name", ["ours", "pillow"])
def test_a_loader_closed_early_leaves_no_threads_or_processes(job: Job, name: str) -> None:
    before = set(threading.enumerate())
    with stream(name, replace(job, batches=50, workers=2)) as batches:
        next(batches)
    assert multiprocessing.active_children() == []
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=20)  # torch's queue feeders end a moment after their queue is closed
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("batch_size", [2, 10, 64, 75])
@pytest.mark.parametrize("batches", [1, 7, 30, 200])
def test_stages_have_enough_batches_and_only_full_ones(shard_set: ShardSet, batches: int, batch_size: int) -> None:
    plan = training_plan(shard_set, [full_batches(shard_set, 32, batches=batches, batch_size=batch_size)])
    assert batches <= plan.total_batches < batches + len(plan.phases)
    for each in plan.phases:
        assert {end - start for _, start, end in map(each.batch_at, range(each.batches))} == {batch_size}


def test_a_set_smaller_than_a_batch_is_refused(shard_set: ShardSet) -> None:
    with pytest.raises(ResoluteError, match="got 75 training samples, expected a full batch of 76"):
        full_batches(shard_set, 32, batches=1, batch_size=76)


@pytest.mark.parametrize("name", [name for name in HERE if LOADERS[name].has_crops])
@pytest.mark.parametrize("frac", [1.0, 0.5])
def test_loaders_resize_the_reported_crop(job: Job, name: str, frac: float) -> None:
    loader, res = LOADERS[name], 64
    module = importlib.import_module(f"resolute.benchmarks.loaders.{loader.module}")
    tars = Tars(job.shards, res, "val")
    jpegs = [tars.jpeg(i) for i in range(5)]
    images, crops = module.centre_crops(replace(job, variant=loader.variant, resolutions=(res,), crop_frac=frac), jpegs)
    assert images.shape == (5, res, res, 3)
    assert images.dtype == np.float32
    values = [psnr_db(image, exact) for image, exact in zip(images, reference(jpegs, crops, res), strict=True)]
    assert min(values) > 35
    wrong = reference(jpegs[1:] + jpegs[:1], crops, res)
    assert max(psnr_db(image, exact) for image, exact in zip(images, wrong, strict=True)) < 30
    assert (name == "pillow") <= (values == [SAME_DB] * 5)


def test_psnr_equals_its_definition() -> None:
    exact = np.full((4, 4, 3), 100, np.uint8)
    assert psnr_db(exact.astype(np.float32), exact) == SAME_DB
    assert psnr_db(exact + np.float32(2), exact) == pytest.approx(20 * math.log10(255 / 2))


def test_cpu_time_of_children_is_counted() -> None:
    before = cpu_time(os.getpid())
    burn = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during, alone = cpu_time(os.getpid()), cpu_time(child.pid)
        child.communicate(b"\n")
    after = cpu_time(os.getpid())
    assert before is not None
    assert during is not None
    assert alone is not None
    assert after is not None
    assert alone[1] == 1
    assert during[1] == before[1] + 1 == after[1] + 1
    assert alone[0] >= 0.48
    assert during[0] - before[0] >= 0.48
    assert after[0] >= during[0]  # an ended child stays counted
    assert cpu_time(2**22 + 1) is None


def test_a_measurement_in_its_own_process_is_complete(job: Job) -> None:
    result = runner(job, "pillow").run("pillow", task="rate", resolutions=(32,), batches=10_000, seconds=0.2, warm_up=4)
    assert result["layout"] == "NCHW"
    assert result["processes"] == 2
    assert result["images_per_s"] > 0
    assert 0 < result["cores_busy"] < 2.5
    assert result["cpu_s_per_1000"] == pytest.approx(1000 * result["cores_busy"] / result["images_per_s"])


def test_a_failing_loader_is_reported_in_one_line(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOADERS, "v2", dataclasses.replace(LOADERS["v2"], module="nowhere"))
    with pytest.raises(ResoluteError, match=r"^loader v2: ended with 1, got ModuleNotFoundError: .*nowhere.*--only$"):
        runner(job, "v2").run("v2", task="rate", resolutions=(32,))


def test_ratios_are_taken_within_a_round(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    # of three rounds, each at both resolutions
    rates = {"ours": iter([10.0, 10.0, 40.0, 40.0, 30.0, 30.0]), "pillow": iter([5.0, 5.0, 10.0, 10.0, 30.0, 30.0])}

    def run(self: Runner, name: str, **settings: Any) -> Any:
        return {"images_per_s": next(rates[name]), "cpu_s_per_1000": 2.0, "cores_busy": 1.5, "first_batch_s": 0.1,
                "host_us_per_image": 9.0, "processes": 3, "threads": 9, "layout": "NCHW"}  # fmt: skip

    monkeypatch.setattr(Runner, "run", run)
    result = measure_rates(runner(job, "ours", "pillow", "timm-scheduled", rounds=3))
    assert [entry["res"] for entry in result["res"]] == [32, 64]
    for entry in result["res"]:
        assert set(entry["loaders"]) == {"ours", "pillow"}
        assert entry["loaders"]["pillow"]["ours_times"]["raw"] == [2.0, 4.0, 1.0]
        assert entry["loaders"]["pillow"]["images_per_s"]["median"] == 10.0
    text = rates_table(result)
    assert text.count(LOADERS["pillow"].title) == 2
    assert "2.00 (1.00..4.00)" in text


def test_every_loader_takes_part_with_its_faster_number_of_workers(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {("ours", 1): 10.0, ("ours", 2): 40.0, ("pillow", 1): 20.0, ("pillow", 2): 5.0}

    def run(self: Runner, name: str, *, workers: int, **settings: Any) -> Any:
        return {"images_per_s": rates[name, workers], "cpu_s_per_1000": 2.0, "cores_busy": 1.5, "first_batch_s": 0.1,
                "host_us_per_image": 9.0, "processes": 3, "threads": 9, "layout": "NCHW"}  # fmt: skip

    monkeypatch.setattr(Runner, "run", run)
    result = measure_rates(runner(job, "ours", "pillow", rounds=2), counts=(1, 2))
    for entry in result["res"]:
        ours, pillow = entry["loaders"]["ours"], entry["loaders"]["pillow"]
        assert (ours["workers"], ours["images_per_s"]["median"]) == (2, 40.0)
        assert (pillow["workers"], pillow["images_per_s"]["median"]) == (1, 20.0)
        assert pillow["ours_times"]["raw"] == [2.0, 2.0]
        assert {number: values["median"] for number, values in pillow["tried"].items()} == {"1": 20.0, "2": 5.0}


def test_every_loader_runs_on_the_same_cores(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 3, 5})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: allowed.append(set(cores)))

    def started(*words: Any, preexec_fn: Any, **settings: Any) -> Any:
        preexec_fn()
        return SimpleNamespace(returncode=0, stdout="{}")

    monkeypatch.setattr(subprocess, "run", started)
    for cores in (2, 0):
        for name in ("ours", "pillow"):
            assert replace(runner(job, name), cores=cores).run(name) == {}
    assert allowed == [{3, 5}] * 2


def line(shard_root: Path, *more: str) -> list[str]:
    return ["--shards", str(shard_root), "--rounds", "1", "--workers", "1", "--batch-size", "8", *more]


def test_the_command_line_writes_every_value_and_no_absolute_path(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Runner.run
    monkeypatch.setattr(Runner, "run", lambda self, *words, **job: run(replace(self, isolated=False), *words, **job))
    out = tmp_path / "loader.json"
    words = line(shard_root, "--only", "pillow", "--res", "32", "--seconds", "0.1", "--out", str(out))
    assert main(words) == 0
    result, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert result["settings"]["loaders"] == ["pillow"]
    assert result["versions"]["torch"]
    (entry,) = result["loader"]["res"]
    assert len(entry["loaders"]["pillow"]["images_per_s"]["raw"]) == 1
    assert [each["psnr_db"] for each in result["quality"]] == [{"pillow": SAME_DB}] * 2
    assert quality_table(result["quality"]) in printed
    assert LOADERS["pillow"].resize in printed
    assert str(shard_root) not in out.read_text()
    assert not list(tmp_path.glob("**/*.npz"))


@pytest.mark.parametrize(("module", "more", "expected"), [
    ("loader", ["--only", "nvjpeg"], "--only: got nvjpeg, expected some of ours,pillow"),
    ("loader", ["--only", "ffcv-output-size"], "expected some of"),
    ("loader", ["--res", "32,x"], "--res: got 32,x"),
    ("loader", ["--res", "128"], "expected some of 32,48,64"),
    ("loader", ["--rounds", "0"], "--rounds: got 0"),
    ("loader", ["--seconds", "0"], "--seconds: got 0"),
    ("loader", ["--batch-size", "76"], "expected a batch of 76"),
    ("loader", ["--ffcv-python", "no-such-python"], "--ffcv-python: got no-such-python"),
    ("change", ["--res", "32"], "--res: got 1 resolution"),
    ("change", ["--batches", "3"], "--batches: got 3, expected at least"),
])  # fmt: skip
def test_bad_arguments_are_reported_in_one_line(
    shard_root: Path, capsys: pytest.CaptureFixture[str], module: str, more: list[str], expected: str
) -> None:
    command = importlib.import_module(f"resolute.benchmarks.{module}").main
    assert command([*line(shard_root), "--only", "pillow", *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m resolute.benchmarks.")
    assert error.count("\n") == 1
    assert expected in error


def test_ffcv_without_an_interpreter_is_left_out_or_refused() -> None:
    args = SimpleNamespace(only=None, ffcv_python=None)
    names, left_out = available(args, rates=True)  # type: ignore[arg-type]
    assert "ours" in names
    assert "ffcv" not in names
    assert list(left_out) == ["ffcv"]
    assert list(available(args, rates=False)[1]) == ["ffcv", "ffcv-output-size"]  # type: ignore[arg-type]
    args.only = "ffcv"
    with pytest.raises(ResoluteError, match="--only ffcv: got no interpreter"):
        available(args, rates=True)  # type: ignore[arg-type]


@needs_ffcv
def test_ffcv_reads_the_same_bytes_and_changes_its_resolution(job: Job) -> None:
    ffcv = runner(job, "ffcv")
    prepared = ffcv.run("ffcv", task="prepare")
    assert prepared["res"]["32"]["jpeg_bytes"] == Tars(job.shards, 32).mean_bytes
    assert prepared["versions"]["ffcv"] == "1.0.2"
    times = ffcv.run("ffcv-output-size", task="clock", batches=4)
    assert [len(stage) for stage in times] == [4, 4]
