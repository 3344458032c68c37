"""The GPU check on a CPU: every part runs, a failure, crash or hang of one stops no other, and the page says so."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resolute.benchmarks.gpu_check import check as command
from resolute.benchmarks.gpu_check import shared
from resolute.benchmarks.gpu_check.check import run_part
from resolute.benchmarks.gpu_check.parts import PARTS, run
from resolute.benchmarks.gpu_check.result import Part, Report, Result, Settings
from resolute.benchmarks.gpu_check.speed import busy_and_gaps, overlap, when_to_decode_on_the_gpu
from resolute.cli import main
from tests import ROOT
from tests.support.commands import Command, Ended

PART = Part(name="pixels", title="Pixels", limit_s=20)


def check(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    status = main(["gpu-check", "--device", "cpu", "--threads", "1", "--out", str(folder), *words])
    return status, json.loads((folder / "gpu-check.json").read_text())


IN_THIS_PROCESS = ("resume", "memory", "decoders", "ranks", "tests")  # they only start others


@pytest.mark.slow  # runs a dozen parts that train
def test_every_part_runs_on_a_cpu_in_the_order_of_the_list(
    tmp_path: Path, forked: Callable[..., Ended], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked, which saves the imports of each command; the tests below start processes as a user's check does."""
    run_new, for_device = subprocess.run, Settings.for_device

    def run_forked(words: list[str], **keys: Any) -> subprocess.CompletedProcess[Any]:
        if "torch.distributed.run" in words:
            words = [*words[:2], "tests.support.torchrun", *words[words.index("--") + 1 :]]
        elif "--gpus" in words or words[1:2] != ["-m"] or not words[2].startswith("resolute"):
            return run_new(words, **keys)
        done = forked(*words[2:])
        return subprocess.CompletedProcess(words, done.status, done.out, done.err)

    def start_forked(words: list[str], **_: Any) -> Any:
        process = Command(words[2], words[3:], folder=ROOT, scratch=tmp_path)
        return SimpleNamespace(poll=lambda: None if process.running else 0, pid=process.pid, wait=process.end)

    def run_quickly(part: Part, folder: Path, *, limit_s: float) -> Result:
        if part.name == "kernels":  # why: Triton's interpreter must be chosen before Triton is loaded
            return run_part(part, folder, limit_s=limit_s)
        if part.name in IN_THIS_PROCESS:
            run(part.name, Settings.load(folder / "settings.json"))
            return loaded(part, folder)
        return loaded(part, folder, forked("resolute.benchmarks.gpu_check.parts", part.name, folder))

    monkeypatch.setattr(subprocess, "run", run_forked)
    monkeypatch.setattr(shared, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start_forked}))
    monkeypatch.setattr(command, "run_part", run_quickly)
    monkeypatch.setattr(
        Settings,
        "for_device",
        lambda device, **keys: dataclasses.replace(for_device(device, **keys), seconds=0.05, rounds=1),
    )
    status, document = check(tmp_path / "out")
    verdicts = {part["part"]: part["verdict"] for part in document["parts"]}
    skipped = {"tests", "sync", "memory", "graphs", "sanitizer"}
    expected = {part.name: "skipped" if part.name in skipped else "passed" for part in PARTS}
    assert (status, list(verdicts), verdicts) == (0, list(expected), expected), document["parts"]
    assert str(tmp_path) not in json.dumps(document["settings"])
    page = (tmp_path / "out/report.html").read_text()
    assert all(part["summary"] in page or "&#39;" in page for part in document["parts"])
    assert f"{len(PARTS) - 5} passed, 0 failed, 5 skipped" in capsys.readouterr().out


def loaded(part: Part, folder: Path, done: Ended | None = None) -> Result:
    """The result file of a part."""
    result = Report.load(folder / f"{part.name}.json")
    assert result is not None, done
    return result


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit('no such GPU')", "ended with status 1; last line of pixels.log: no such GPU"),
        ("print('done')", "wrote no result; last line of pixels.log: done"),
    ],
)
def test_a_part_that_ends_without_a_result_has_failed(tmp_path: Path, code: str, words: str) -> None:
    (tmp_path / "pixels.json").write_text('{"verdict": "passed", "summary": "of an earlier check"}')
    result = run_part(PART, tmp_path, limit_s=20, words=[sys.executable, "-c", code])
    assert result.verdict == "failed"
    assert result.summary.startswith(words)


START = """
import os, sys, time
from resolute.benchmarks.gpu_check import correctness, parts
"""
CRASH = """
def part(settings, report):
    report.table("what", "rate#")
    report.row("before the crash", 7)
    os.abort()
parts._FUNCTIONS[sys.argv[1]] = part
"""
HANG = "parts._FUNCTIONS[sys.argv[1]] = lambda settings, report: time.sleep(600)"
WRONG_KERNEL = """
import torch
from resolute.pipeline.graph import gpu_augment
class WrongInOnePixel:
    def __init__(self, ops, *, mean, noise, **others):
        self.constants = {"mean": mean, "noise": noise}
    def rows(self, spec):
        return [spec]
    def __call__(self, images, spec):
        out = correctness._on_cpu(images.numpy(), spec, **self.constants)
        out[0, 0, 0] ^= 8
        return torch.from_numpy(out)
    def close(self):
        pass
gpu_augment.GpuAugment = WrongInOnePixel
"""
WRONG_BATCHES = """
from resolute.pipeline.loader.loader import Loader
made, deliver = [], Loader._deliver
def every_other(self):
    made.append(self) if self not in made else None
    batch = deliver(self)
    batch.images.add_(0.2 * (made.index(self) % 2))
    return batch
Loader._deliver = every_other
"""
PLANTED = {"kernels": WRONG_KERNEL, "pixels": WRONG_BATCHES, "buffers": WRONG_BATCHES, "resume": HANG, "memory": CRASH}


@pytest.mark.slow  # starts a process for each part
def test_whatever_fails_the_page_is_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shard_root: Path, forked: Callable[..., Ended]
) -> None:
    def planted(part: Part, folder: Path, *, limit_s: float) -> Result:
        fault = PLANTED[part.name]
        code = f"{START}{fault}\nparts.main(sys.argv[1:])"
        if fault in (CRASH, HANG):
            words = [sys.executable, "-c", code, part.name, str(folder)]
            return run_part(part, folder, limit_s=2 if fault == HANG else limit_s, words=words)
        return loaded(part, folder, forked("tests.support.execute", code, part.name, folder))  # saves the imports

    monkeypatch.setattr(command, "run_part", planted)
    status, document = check(tmp_path / "out", "--shards", str(shard_root), "--only", ",".join(PLANTED))
    assert (status, document["verdict"]) == (1, "failed")
    assert {part["part"]: part["verdict"] for part in document["parts"]} == dict.fromkeys(PLANTED, "failed")
    page = (tmp_path / "out/report.html").read_text()
    for part in document["parts"]:
        fault = PLANTED[part["part"]]
        assert f"{part['title']}: failed".replace("'", "&#39;") in page
        if fault == CRASH:
            assert part["tables"] == [[["what", "rate#"], [["before the crash", "7"]]]]
            assert part["summary"].startswith("ended by SIGABRT"), part
        elif fault == HANG:
            assert part["summary"].startswith("no result after 2 s"), part
        else:
            assert "apart" in part["summary"] or "levels" in part["summary"] or " as before" in part["summary"], part


def test_an_exception_in_a_part_is_a_failure_with_its_message(tmp_path: Path) -> None:
    run("pixels", Settings.for_device("cpu", folder=tmp_path, shards=str(tmp_path / "none"), threads=1))
    result = Report.load(tmp_path / "pixels.json")
    assert result is not None
    assert result.verdict == "failed"
    assert "none" in result.summary


def test_parts_that_could_not_begin_in_time_are_skipped(tmp_path: Path, shard_root: Path) -> None:
    words = "--only", "device,switch", "--shards", str(shard_root), "--minutes", "0.1"
    status, document = check(tmp_path / "out", *words)
    assert (status, {part["verdict"] for part in document["parts"]}) == (0, {"skipped"})
    assert document["parts"][1]["summary"] == "the 0.1 minutes are over"
    assert "2 skipped" in (tmp_path / "out/report.html").read_text()


def test_gaps_are_where_no_span_is() -> None:
    spans = [(0.0, 400.0), (100.0, 500.0), (700.0, 800.0), (850.0, 1000.0)]  # gaps of 200 and 50 us
    busy, gaps = busy_and_gaps(reversed(spans))
    assert (busy, gaps) == (0.75, [200.0])
    assert busy_and_gaps([]) == (0.0, [])


def test_averaging_overlaps_where_other_kernels_run_meanwhile() -> None:
    kernels = [("conv", 0.0, 10.0), ("ncclAllReduce", 5.0, 15.0), ("conv", 6.0, 12.0), ("ncclAllReduce", 20.0, 30.0)]
    assert overlap(kernels) == (12.0 - 5.0) / 20.0
    assert overlap(kernels[:1]) is None


@pytest.mark.parametrize(
    ("on_gpu", "works", "advice"),
    [
        (39_791.0, True, "--decode gpu pays if the loader needs more: 39,791 images/s, against 7,821 by 3.6 cores"),
        (7_000.0, True, "--decode gpu does not pay: 7,000 images/s, against 7,821 by 3.6 cores"),
        (39_791.0, False, "--decode gpu does not work here"),
    ],
)
def test_the_decoders_say_whether_decoding_on_the_gpu_pays(on_gpu: float, works: bool, advice: str) -> None:
    rates = {"cpu None": {"images_per_s": 7_821.0, "cores": 3.6}, "whole 1.0": {"images_per_s": on_gpu, "cores": 1.8}}
    assert when_to_decode_on_the_gpu(rates, works=works) == advice
