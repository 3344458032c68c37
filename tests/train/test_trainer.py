"""Training runs as processes: complete, bit-identical after any interruption, errors in one line."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resolute.cli import main
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.batch import Batch
from resolute.pipeline.plan.plan import Plan
from resolute.train.learner import Learner
from resolute.train.logs.metrics import read_log
from resolute.train.recipe.schema import Recipe
from tests import ROOT
from tests.support.commands import Command, Ended
from tests.train.conftest import assert_equal_runs, without_clocks

Words = Callable[[Path], list[str]]
Started = Callable[..., Ended]
STEP, EVAL = "resolute.train.learner:Learner:train_step", "resolute.train.learner:Learner:eval_step"
SAVE = "resolute.train.checkpoint::save"
pytestmark = pytest.mark.slow
BACK = ["--from", "step-00000024.pt"]  # of a finished run: two steps before its end
SYNC = "os::fsync"  # in the middle of a save: log or partial file are written but not committed


@pytest.fixture(scope="module")
def words(words: Words) -> Words:
    return lambda runs: [*words(runs), "--threads", "2"]  # sums of several threads are exact as well


@pytest.fixture(scope="module")
def train_process(words: Words, forked: Started) -> Started:
    """train_process(runs, more arguments): the tiny run's command line, in a process of its own."""
    return lambda runs, *more: forked("resolute", *words(runs), *more)


@pytest.fixture(scope="module")
def killed(words: Words, forked: Started) -> Started:
    """killed(runs, "module:Owner:function:nth call:signal", more): `train_process` with that signal at that call."""
    return lambda runs, cue, *more: forked("tests.support.signal_at_call", cue, *words(runs), *more)


@pytest.fixture(scope="module")
def finished(train_process: Started, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run, made by a process like the interrupted ones: same thread pools."""
    runs = tmp_path_factory.mktemp("whole")
    done = train_process(runs)
    assert done.status == 0, done.err
    assert "no GPU found" not in done.out  # --device cpu was passed
    return runs / "tiny"


def test_a_finished_run_has_all_files_and_saw_each_sample_once_per_epoch(
    finished: Path, shard_set: ShardSet, recipe_file: Path
) -> None:
    checkpoints = {"last.pt", "best.pt", "step-00000024.pt", "step-00000026.pt"}
    assert {f.name for f in finished.iterdir()} == {
        "run.jsonl",
        "recipe.toml",
        "report.html",
        "validation.json",
    } | checkpoints
    records = without_clocks(finished / "run.jsonl")
    assert [r["kind"] for r in records if r["kind"] not in ("step", "best")] == ["start", *["epoch"] * 5, "end"]
    plan = Plan(shard_set, Recipe.load(recipe_file).stages, seed=5, eval_batch_size=8)
    logged = [r["index"] for r in records if r["kind"] == "step"]
    assert logged == [i for i in range(plan.total_batches) if plan.phase_at(i).split == "train"]
    seen = Counter((plan.phase_at(i).epoch, int(sample)) for i in logged for sample in plan.batch(i).ids)
    assert set(seen.values()) == {1}
    assert Counter(epoch for epoch, _ in seen) == {0: 38, 1: 38, 2: 75, 3: 56, 4: 56}
    for record in records:
        if record["kind"] == "epoch":
            assert 0 <= record["top1"] <= record["top5"] == 1.0  # three classes
            assert record["samples"] == [38, 38, 75, 56, 56][record["epoch"]]
            labels = [shard_set.splits["train"].samples[i]["label"] for epoch, i in seen if epoch == record["epoch"]]
            assert record["class_counts"] == np.bincount(labels, minlength=3).tolist()


def test_a_run_killed_again_and_again_is_bit_identical_to_the_uninterrupted_run(
    finished: Path, killed: Started, train_process: Started, tmp_path: Path
) -> None:
    """kill -9 in the first save, in a validation, before a save, and in the first steps of a stage (at 6 and 16)."""
    last, steps = tmp_path / "tiny" / "last.pt", []
    for cue in (f"{SYNC}:2:9", f"{SYNC}:3:9", f"{EVAL}:2:9", f"{SAVE}:4:9", f"{STEP}:12:9"):
        assert killed(tmp_path, cue).status == 137
        steps.append(torch.load(last, weights_only=True)["step"] if last.exists() else 0)
    assert steps == sorted(steps)
    assert steps[-2:] == [6, 16]
    done = train_process(tmp_path)
    assert done.status == 0, done.err
    assert "resuming at batch" in done.out
    assert_equal_runs(tmp_path / "tiny", finished)


def test_signals_end_the_run_cleanly_at_any_time_unless_ignored_and_the_same_command_completes_it(
    finished: Path, killed: Started, words: Words, forked: Started, tmp_path: Path
) -> None:
    def ended(cue: str, status: int) -> Ended:
        cut = killed(tmp_path, cue)
        assert cut.status == status, cut.err
        assert "Traceback" not in cut.err
        return cut

    warm_up = ended("torch:Tensor:backward:1:2", 130)  # that of the first shape
    assert "stopped by SIGINT before its first batch; the same command starts it again" in warm_up.out
    assert "warmed up" not in warm_up.out
    second = ended(f"{STEP}:1:2,2", 130).err
    assert second.endswith("stopped immediately, without saving; run the same command to resume\n")
    for cue, status in ((f"{STEP}:4:15", 143), (f"{EVAL}:1:2", 130), (f"{STEP}:3:1", 129)):
        assert "saved at batch" in ended(cue, status).out
    done = forked("tests.support.signal_at_call", "--nohup", f"{STEP}:8:1", *words(tmp_path))  # SIGHUP is ignored
    assert done.status == 0, done.err
    assert_equal_runs(tmp_path / "tiny", finished)


def test_nothing_is_saved_in_a_folder_that_took_the_place_of_the_runs(
    finished: Path, words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a mount is lost, and its mount point is an empty folder."""
    step, folder, away = Learner.train_step, tmp_path / "tiny", tmp_path / "away"

    def lose_the_mount(learner: Learner, batch: Batch) -> Any:
        folder.rename(away)
        folder.mkdir()
        return step(learner, batch)

    shutil.copytree(finished, folder)
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "train_step", lose_the_mount)
        assert main([*words(tmp_path), *BACK, "--save-every-steps", "1"]) == 2
    assert "tiny: replaced while the run was writing" in capsys.readouterr().err
    assert not list(folder.glob("*.pt"))
    shutil.rmtree(folder, ignore_errors=True)
    away.rename(folder)
    assert main(words(tmp_path)) == 0
    assert_equal_runs(folder, finished)


def test_a_folder_of_a_running_training_is_locked_for_writers_but_readable(
    finished: Path, words: Words, tmp_path: Path, shard_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first run is stopped (SIGSTOP) between two checkpoints and continued at the end."""
    folder = Path(shutil.copytree(finished, tmp_path / "tiny"))
    (folder / ".last.pt.0123456789ab.partial").write_text("left by a killed process")
    line = [f"{STEP}:1:19", *words(tmp_path), *BACK]
    first = Command("tests.support.signal_at_call", line, folder=ROOT, scratch=tmp_path)
    try:
        while Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":  # stopped
            assert first.running
            time.sleep(0.01)
        log = (folder / "run.jsonl").read_bytes()
        assert main(words(tmp_path)) == 2
        err = capsys.readouterr().err
        assert f"tiny: another training is writing here, got host {socket.gethostname()}, pid {first.pid}, since" in err
        assert "choose another RUN" in err
        assert err.count("\n") == 1
        assert (folder / "run.jsonl").read_bytes() == log
        assert main(["eval", str(folder), "--shards", str(shard_root), "--device", "cpu", "--threads", "1"]) == 0
    finally:
        first.send(signal.SIGCONT)
        done = first.end()
    assert done.status == 0, done.err
    assert_equal_runs(folder, finished)
    assert {path.name for path in folder.iterdir()} == {path.name for path in finished.iterdir()} | {"eval.json"}


def test_a_finished_run_is_not_changed_and_its_log_holds_the_digest_of_each_checkpoint(
    finished: Path, words: Words, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "last.pt").read_bytes()
    assert main(words(finished.parent)) == 0
    assert "this run is finished" in capsys.readouterr().out
    assert (finished / "last.pt").read_bytes() == before
    digests = {r["file"]: r["sha256"] for r in read_log(finished / "run.jsonl") if r["kind"] == "checkpoint"}
    assert set(digests) == {f"step-{step:08d}.pt" for step in (3, 6, 9, 12, 15, 16, 18, 21, 24, 26)}
    for name in ("step-00000024.pt", "step-00000026.pt"):
        assert hashlib.sha256((finished / name).read_bytes()).hexdigest() == digests[name]


def test_a_full_disk_is_reported_and_the_run_can_be_resumed(
    finished: Path, words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Learner.train_step

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shutil.copytree(finished, tmp_path / "tiny")
    with monkeypatch.context() as patch:

        def fill_the_disk(learner: Learner, batch: Batch) -> Any:
            patch.setattr(os, "fsync", full)
            return step(learner, batch)

        patch.setattr(Learner, "train_step", fill_the_disk)
        assert main([*words(tmp_path), *BACK, "--save-every-steps", "1"]) == 2
    line = "run.jsonl: not written (No space left on device), the last checkpoint is kept; make room and run again"
    assert line in capsys.readouterr().err
    assert main(words(tmp_path)) == 0
    assert_equal_runs(tmp_path / "tiny", finished)


def test_a_run_that_went_back_from_a_damaged_checkpoint_resumes_from_there_without_from(
    finished: Path,
    killed: Started,
    train_process: Started,
    words: Words,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(finished, tmp_path / "tiny")
    for file in (tmp_path / "tiny" / "last.pt", tmp_path / "tiny" / "step-00000026.pt"):  # two names of one file
        file.write_bytes(file.read_bytes()[:-1000])
    assert main(words(tmp_path)) == 2
    err = capsys.readouterr().err
    assert "last.pt: damaged, or not a checkpoint" in err
    assert "step-00000024.pt (step 24) is good: resume with --from step-00000024.pt" in err
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
        assert main([*words(tmp_path), *BACK]) == 2
    assert "--from: got step-00000024.pt with up to 3 restarts, expected none" in capsys.readouterr().err
    cut = killed(tmp_path, f"{STEP}:1:2", *BACK)
    assert cut.status == 130, cut.err
    assert "run the same command without --from to resume" in cut.out
    assert killed(tmp_path, f"{STEP}:1:9", *BACK).status == 137
    done = train_process(tmp_path)
    assert done.status == 0, done.err
    assert "resuming at batch" in done.out
    assert_equal_runs(tmp_path / "tiny", finished)
