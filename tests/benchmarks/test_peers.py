"""Every peer is given the very same images and does the same work; what is told of it is what it did."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import subprocess
import sys
import tarfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers import __main__ as command
from benchmarks.peers import run
from benchmarks.peers.child import TASKS
from benchmarks.peers.cpu import tree
from benchmarks.peers.job import MEAN, STD, Job
from benchmarks.peers.psnr import SAME_DB, psnr_db, reference
from benchmarks.peers.registry import PEERS
from benchmarks.peers.report import changes_table, quality_table, rates_table, words
from benchmarks.peers.tars import Tars, endless
from benchmarks.switch import cost_s
from pipeline.errors import ResoluteError
from tests.conftest import RESOLUTIONS

FFCV_PYTHON = os.environ.get("FFCV_PYTHON")
HERE = [name for name, peer in PEERS.items() if peer.module != "with_ffcv"]
# torchvision 0.29 says so of the decoder that it ships; who is measured is not ours to change
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities:DeprecationWarning")
needs_ffcv = pytest.mark.skipif(not FFCV_PYTHON, reason="FFCV_PYTHON names no interpreter that has FFCV")


@pytest.fixture
def job(shard_root: Path, tmp_path: Path) -> Job:
    return Job(task="rate", module="", shards=str(shard_root), scratch=str(tmp_path), resolutions=(32, 64), batches=3,
               batch_size=8, workers=1)  # fmt: skip


def runner(job: Job, *peers: str) -> run.Runner:
    return run.Runner(job=job, peers=peers, ffcv_python=FFCV_PYTHON, show_progress=lambda _: None)


def in_this_process(self: run.Runner, name: str, **settings: Any) -> Any:
    """Runner.run without the seconds that a new interpreter takes to import torch."""
    peer = PEERS[name]
    given = replace(self.job, module=peer.module, variant=peer.variant, **settings)
    return TASKS[given.task](importlib.import_module(f"benchmarks.peers.{peer.module}"), given)


@pytest.mark.parametrize("res", RESOLUTIONS)
def test_images_are_the_members_of_the_tars_in_their_order(shard_root: Path, res: int) -> None:
    tars, expected = Tars(shard_root, res), []
    for path in sorted((shard_root / str(res)).glob("train-*.tar")):
        with tarfile.open(path) as tar:
            expected += [tar.extractfile(member).read() for member in tar.getmembers()]  # type: ignore[union-attr]
    assert [tars.jpeg(i) for i in range(len(tars))] == expected[::2]
    assert tars.labels == [int(label) for label in expected[1::2]]
    assert tars.mean_bytes == pytest.approx(np.mean([len(jpeg) for jpeg in expected[::2]]))


@pytest.mark.parametrize(("samples", "total"), [(7, 7), (7, 3), (7, 30), (1, 5)])
def test_an_endless_epoch_is_one_permutation_after_another(samples: int, total: int) -> None:
    order = list(itertools.islice(endless(samples, seed=1), total))
    assert len(order) == total
    for start in range(0, total - samples + 1, samples):
        assert sorted(order[start : start + samples]) == list(range(samples))
    assert len(set(order[: samples])) == min(samples, total)


def test_a_job_arrives_as_it_was_sent(job: Job) -> None:
    assert Job.read(job.text()) == job
    assert Job.read(replace(job, scale=(0.1, 0.5), variant="x").text()) != job


@pytest.mark.parametrize("name", HERE)
def test_every_peer_delivers_the_same_kind_of_batches(job: Job, name: str) -> None:
    torch.manual_seed(0)
    peer = PEERS[name]
    module = importlib.import_module(f"benchmarks.peers.{peer.module}")
    with closing(module.stream(replace(job, variant=peer.variant))) as stream:
        batches = [batch.clone() for batch in stream]
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


@pytest.mark.parametrize("name", [name for name in HERE if PEERS[name].driven])
@pytest.mark.parametrize("frac", [1.0, 0.5])
def test_driven_peers_resize_the_window_that_they_name(job: Job, name: str, frac: float) -> None:
    peer, res = PEERS[name], 64
    module = importlib.import_module(f"benchmarks.peers.{peer.module}")
    tars = Tars(job.shards, res, "val")
    jpegs = [tars.jpeg(i) for i in range(5)]
    images, windows = module.centre_crops(replace(job, variant=peer.variant, resolutions=(res,), crop_frac=frac), jpegs)
    assert images.shape == (5, res, res, 3)
    assert images.dtype == np.float32
    values = [psnr_db(image, exact) for image, exact in zip(images, reference(jpegs, windows, res), strict=True)]
    assert min(values) > 35
    wrong = reference(jpegs[1:] + jpegs[:1], windows, res)
    assert max(psnr_db(image, exact) for image, exact in zip(images, wrong, strict=True)) < 30
    assert (name == "pillow") <= (values == [SAME_DB] * 5)


def test_psnr_is_its_definition() -> None:
    exact = np.full((4, 4, 3), 100, np.uint8)
    assert psnr_db(exact.astype(np.float32), exact) == SAME_DB
    assert psnr_db(exact + np.float32(2), exact) == pytest.approx(20 * math.log10(255 / 2))


def test_cpu_time_of_children_is_counted() -> None:
    before = tree(os.getpid())
    burn = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during, alone = tree(os.getpid()), tree(child.pid)
        child.communicate(b"\n")
    after = tree(os.getpid())
    assert before is not None
    assert during is not None
    assert alone is not None
    assert after is not None
    assert alone[1] == 1
    assert during[1] == before[1] + 1 == after[1] + 1
    assert alone[0] >= 0.48
    assert during[0] - before[0] >= 0.48
    assert after[0] >= during[0]  # an ended child stays counted
    assert tree(2**22 + 1) is None


def test_a_measurement_in_a_process_of_its_own_is_told_in_full(job: Job) -> None:
    found = runner(job, "pillow").run("pillow", task="rate", resolutions=(32,), batches=10_000, seconds=0.2, warm_up=4)
    assert found["layout"] == "NCHW"
    assert found["processes"] == 2
    assert found["images_per_s"] > 0
    assert 0 < found["cores_busy"] < 2.5
    assert found["cpu_s_per_1000"] == pytest.approx(1000 * found["cores_busy"] / found["images_per_s"])


def test_a_peer_that_fails_is_one_clear_line(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "v2", replace(PEERS["v2"], module="nowhere"))
    with pytest.raises(ResoluteError, match=r"^peer v2: ended with 1, got ModuleNotFoundError: .*nowhere.*--only$"):
        runner(job, "v2").run("v2", task="rate", resolutions=(32,))


def answers(**rates: list[float]) -> Any:
    """A stand-in for Runner.run: the rates of each peer, in turn."""
    left = {name: iter(values) for name, values in rates.items()}

    def answer(self: run.Runner, name: str, **settings: Any) -> Any:
        rate = next(left[name])
        return {"images_per_s": rate, "cpu_s_per_1000": 2.0, "cores_busy": 1.5, "first_batch_s": 0.1, "processes": 3,
                "threads": 9, "layout": "NCHW"}  # fmt: skip

    return answer


def test_ratios_are_of_one_round(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.Runner, "run", answers(ours=[10.0, 40.0, 30.0] * 2, pillow=[5.0, 10.0, 30.0] * 2))
    found = run.rates(runner(job, "ours", "pillow", "timm-scheduled"), rounds=3)
    assert [entry["res"] for entry in found] == [32, 64]
    for entry in found:
        assert set(entry["peers"]) == {"ours", "pillow"}
        assert entry["peers"]["pillow"]["ours_times"]["raw"] == [2.0, 4.0, 1.0]
        assert entry["peers"]["pillow"]["images_per_s"]["median"] == 10.0
    text = rates_table(found)
    assert text.count(PEERS["pillow"].title) == 2
    assert "2.00 (1.00..4.00)" in text


def test_stage_changes_are_counted_as_everywhere_else(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [[9.0, *([1.0] * 29)], [4.0, *([2.0] * 29)]]
    monkeypatch.setattr(run.Runner, "run", lambda self, name, **settings: stages)
    found = run.changes(runner(job, "ours", "timm-scheduled"), rounds=2, batches=30)
    for values in found["changes"][0]["peers"].values():
        assert values["cost_s"]["raw"] == [cost_s(stages[1], 1)] * 2 == [2.0] * 2
    text = changes_table(found)
    assert text.count("32 -> 64 px") == 2
    assert PEERS["timm-scheduled"].at_change in text


def test_a_peer_that_did_not_change_has_no_cost(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.Runner, "run", lambda self, name, **settings: [[1.0] * 60, []])
    with pytest.raises(AssertionError, match="ours"):
        run.changes(runner(job, "ours"), rounds=1, batches=30)


def line(shard_root: Path, *more: str) -> list[str]:
    return ["--shards", str(shard_root), "--seconds", "0.1", "--rounds", "1", "--workers", "1", "--batch-size", "8",
            *more]  # fmt: skip


def test_the_command_line_writes_every_value_and_no_path(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.Runner, "run", in_this_process)
    out = tmp_path / "peers.json"
    assert command.main(line(shard_root, "--only", "pillow", "--res", "32", "--out", str(out))) == 0
    result, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert result["format"] == command.FORMAT
    assert result["settings"]["peers"] == ["pillow"]
    assert result["versions"]["torch"]
    (entry,) = result["rates"]
    assert len(entry["peers"]["pillow"]["images_per_s"]["raw"]) == 1
    assert [found["psnr_db"] for found in result["quality"]] == [{"pillow": SAME_DB}] * 2
    assert quality_table(result["quality"]) in printed
    assert words(["pillow"]) in printed
    assert str(shard_root) not in out.read_text()
    assert not list(tmp_path.glob("**/*.npz"))


@pytest.mark.parametrize(("more", "expected"), [
    (["--only", "nvjpeg"], "--only: got nvjpeg, expected some of ours,pillow"),
    (["--only", "ffcv-output-size"], "expected some of"),
    (["--res", "32,x"], "--res: got 32,x"),
    (["--res", "64,32"], "ascending"),
    (["--res", "128"], "expected some of 32,48,64"),
    (["--switch", "--res", "32"], "--switch: got one resolution"),
    (["--switch", "--batches", "3"], "--batches: got 3, expected at least"),
    (["--rounds", "0"], "--rounds: got 0"),
    (["--seconds", "0"], "--seconds: got 0"),
    (["--batch-size", "76"], "expected a batch of 76"),
    (["--ffcv-python", "no-such-python"], "--ffcv-python: got no-such-python"),
])  # fmt: skip
def test_mistakes_are_one_line(
    shard_root: Path, capsys: pytest.CaptureFixture[str], more: list[str], expected: str
) -> None:
    assert command.main([*line(shard_root), "--only", "pillow", *more]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert expected in said


def test_without_its_interpreter_ffcv_is_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FFCV_PYTHON", raising=False)
    parse = command._parser().parse_args
    names, left_out = command._names(parse(["--shards", "x"]))
    assert "ours" in names
    assert "ffcv" not in names
    assert list(left_out) == ["ffcv"]
    assert list(command._names(parse(["--shards", "x", "--switch"]))[1]) == ["ffcv", "ffcv-output-size"]
    with pytest.raises(ResoluteError, match="--only ffcv: got no interpreter"):
        command._names(parse(["--shards", "x", "--only", "ffcv"]))


@needs_ffcv
def test_ffcv_reads_the_same_bytes_and_changes_its_size(job: Job) -> None:
    ffcv = runner(job, "ffcv")
    found = ffcv.run("ffcv", task="prepare")
    assert found["res"]["32"]["jpeg_bytes"] == Tars(job.shards, 32).mean_bytes
    assert found["versions"]["ffcv"] == "1.0.2"
    times = ffcv.run("ffcv-output-size", task="clock", batches=4)
    assert [len(stage) for stage in times] == [4, 4]
