"""Several ranks train as one process does: the same order, losses, weights and counts, also after a resume."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.train import launch as launch_module
from resolute.train.devices.device import pick_device
from resolute.train.devices.distributed import Ranks
from resolute.train.learner import Learner
from resolute.train.recipe.schema import Recipe
from tests import ROOT
from tests.support.commands import Command, Ended
from tests.support.fake_cuda import FakeCuda
from tests.train.conftest import stages, train_words, without_clocks

CPU = torch.device("cpu")
OVERRIDES = "loss.label_smoothing = 0.0\noptim.weight_decay = 0.0\naugment.mixup_alpha = 0.2"
STAGES = stages((32, 1, 16), (48, 1, 11))
# no batch statistics: the result of a sample does not depend on the local batch
EQUAL = """
seed = 3
model = { name = "test_convnext" }
optim = { lr = 0.05, weight_decay = 0.01, clip_norm = 1.0, grad_accum_steps = 2 }
loss = { label_smoothing = 0.1, class_weights = { class0 = 0.5, class2 = 3.0 } }
data = { sampling = "sqrt" }
precision = { amp = "off" }
ema = { decay = 0.9 }
augment = { mixup_prob = 0.5, mixup_alpha = 0.4 }
eval = { batch_size = 7 }
""" + STAGES.replace("epochs = 1", f"epochs = 1\ntrain_from = 'stages.2'\n{OVERRIDES}", 1)
STATISTICS = f"""
model = {{ name = "test_resnet" }}
optim = {{ lr = 0.05 }}
precision = {{ amp = "off" }}
ema = {{ decay = 0.9 }}
eval = {{ batch_size = 8 }}
{STAGES}"""
EARLY = f"""
model = {{ name = "test_resnet" }}
stop = {{ patience = 1, min_delta = 0.99 }}
precision = {{ amp = "off" }}
{stages((32, 9, 16))}"""


class Made:
    """The folder of the tiny recipes; `words` is the command line of a run."""

    def __init__(self, folder: Path, shards: Path) -> None:
        self.folder, self.shards = folder, shards
        for name, text in (("equal", EQUAL), ("statistics", STATISTICS), ("early", EARLY)):
            (folder / f"{name}.toml").write_text(text)

    def words(self, runs: str, *more: str) -> list[str]:
        recipe = self.folder / "equal.toml"
        return train_words(self.shards, recipe, self.folder / runs, "--save-every-steps", "2", *more)

    def seen(self, name: str) -> dict[int, list[int]]:
        """The samples of each training batch, rank after rank, as the ranks of that run recorded them."""
        parts = [
            dict(json.loads(line) for line in path.read_text().splitlines())
            for path in sorted(self.folder.glob(f"{name}.seen*"))
        ]
        assert len({tuple(part) for part in parts}) == 1  # the same batches on each
        return {index: [sample for part in parts for sample in part[index]] for index in parts[0]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, shard_root: Path) -> Made:
    return Made(tmp_path_factory.mktemp("ranks"), shard_root)


@pytest.fixture(scope="module")
def alone(made: Made) -> Path:
    """The folder of the uninterrupted run of one process."""
    assert main(made.words("alone")) == 0
    return made.folder / "alone" / "equal"


@pytest.fixture(scope="module")
def terminated(made: Made, forked: Callable[..., Ended]) -> Ended:
    """A run of two ranks, cut by a SIGTERM to torchrun's launcher in its third step."""
    (made.folder / "cut").mkdir()
    launch = [2, 0, str(made.folder / "cut"), "end", 2, made.words("cut")]
    return forked("tests.support.ranks_driver", json.dumps([launch]))


@pytest.fixture(scope="module")
def driven(made: Made, terminated: Ended, forked: Callable[..., Ended]) -> str:
    """Output of three ranks (an uninterrupted run, a resumed one, one with batch statistics, one that stops early),
    then of two ranks of which one is killed."""
    shutil.copytree(made.folder / "cut" / "equal", made.folder / "three" / "cut")
    shards, equal = str(made.shards), str(made.folder / "equal.toml")
    lines = [[shards, equal, str(made.folder / "three" / name)] for name in ("cut", "whole")]
    for name in ("statistics", "early"):
        lines.append([shards, str(made.folder / f"{name}.toml"), str(made.folder / "three" / name)])
    (made.folder / "killed").mkdir()
    done = forked(
        "tests.support.ranks_driver",
        json.dumps(
            [
                [3, 0, str(made.folder / "three"), "", -1, *lines],
                [2, 1, str(made.folder / "killed"), "kill", 7, made.words("killed")],
            ]
        ),
    )
    assert done.status == 0, done.err
    return done.out


def assert_same_within_rounding(got: Path, expected: Path) -> None:
    """Every step's loss, every epoch's counts, the final weights and their average."""
    ours, theirs = (without_clocks(folder / "run.jsonl") for folder in (got, expected))
    steps, wanted = ([r for r in records if r["kind"] == "step"] for records in (ours, theirs))
    assert [r["index"] for r in steps] == [r["index"] for r in wanted]
    np.testing.assert_allclose([r["loss"] for r in steps], [r["loss"] for r in wanted], rtol=1e-5)
    epochs, wanted = ([r for r in records if r["kind"] == "epoch"] for records in (ours, theirs))
    for name in ("epoch", "samples", "class_counts", "top1", "top5", "ema_top1", "ema_top5"):
        assert [r[name] for r in epochs] == [r[name] for r in wanted], name
    state, other = (torch.load(folder / "last.pt", weights_only=True) for folder in (got, expected))
    for part in ("model", "ema"):
        assert state[part].keys() == other[part].keys()
        for name, tensor in other[part].items():
            torch.testing.assert_close(state[part][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["three/whole", "three/cut", "killed/equal", "one/equal"])
def test_ranks_train_as_one_process_also_after_a_kill_or_resumed_with_another_number_of_them(
    made: Made, alone: Path, driven: str, run: str
) -> None:
    """Three ranks; two ranks, cut by a signal and resumed on three, restarted after a kill, or resumed on one."""
    if run == "one/equal":
        shutil.copytree(made.folder / "cut" / "equal", made.folder / run)
        assert main(made.words("one")) == 0
    elif run != "three/whole":
        assert f"{made.folder / run}: resuming at batch" in driven
    assert_same_within_rounding(made.folder / run, alone)


@pytest.mark.slow
def test_a_signal_to_torchrun_saves_all_ranks_at_the_same_batch(made: Made, terminated: Ended) -> None:
    assert terminated.out.count("stopped by SIGTERM and saved at batch") == 1
    assert "error:" not in terminated.err
    folder = made.folder / "cut" / "equal"
    position = torch.load(folder / "last.pt", weights_only=True)["position"]
    assert 3 <= position <= 5  # within two batches of the signal
    steps = [json.loads(path.read_text().splitlines()[-1])[0] for path in (made.folder / "cut").glob("run.seen*")]
    assert steps == [position - 1] * 2


@pytest.mark.slow
def test_the_ranks_see_the_planned_samples_in_the_planned_order(made: Made, driven: str, shard_set: ShardSet) -> None:
    plan = Recipe.load(made.folder / "equal.toml").plan(shard_set)
    planned = {i: plan.batch(i).ids.tolist() for i in range(plan.total_batches) if plan.phase_at(i).split == "train"}
    assert made.seen("three/whole") == planned
    assert made.seen("cut/run") | made.seen("three/cut") == planned
    assert not made.seen("cut/run").keys() & made.seen("three/cut").keys()


@pytest.mark.slow
def test_all_ranks_validate_with_the_mean_of_their_batch_statistics(
    made: Made, driven: str, shard_set: ShardSet
) -> None:
    """One process that loads the checkpoint gets the counts of the three ranks."""
    recipe = Recipe.load(made.folder / "statistics.toml")
    plan = Plan(shard_set, recipe.stages, eval_batch_size=8)
    learner = Learner(recipe, classes=3, total_steps=plan.total_steps, device=CPU)
    folder = made.folder / "three" / "statistics"
    learner.load_state_dict(torch.load(folder / "last.pt", weights_only=True))
    with Loader(plan, start=plan.phases[-1].first, num_threads=1) as loader:
        sums = [learner.eval_step(batch).sums for batch in loader]
    counts = torch.stack([torch.cat([batch["raw"], batch["ema"]]) for batch in sums]).sum(0) / 15
    record = [r for r in without_clocks(folder / "run.jsonl") if r["kind"] == "epoch"][-1]
    got = [record[name] for name in ("top1", "top5", "eval_loss", "ema_top1", "ema_top5", "ema_eval_loss")]
    assert got == pytest.approx(counts.tolist())


@pytest.mark.slow
def test_ranks_stop_early_together_and_only_the_first_prints(made: Made, driven: str) -> None:
    assert driven.count("stopped early: top-1 no better than") == 1
    assert driven.count(f"{made.folder / 'three' / 'early'}: starting") == 1
    epochs = [r["epoch"] for r in without_clocks(made.folder / "three" / "early" / "run.jsonl") if r["kind"] == "epoch"]
    assert epochs == [0, 1]
    assert len(made.seen("three/early")) == 10  # two epochs of 5 steps, on each rank


@pytest.mark.slow
def test_collectives_votes_and_gradients_of_three_ranks(made: Made, driven: str) -> None:
    measured = [json.loads((made.folder / "three" / f"measured{rank}").read_text()) for rank in range(3)]
    for rank, got in enumerate(measured):
        assert (made.folder / "three" / f"after{rank}").read_text() == "[0, 0]"  # no vote reaches the next run
        assert got["votes"] == [[0, 0], [2, 0], [0, 5], [0, 0]]  # the largest of all, one call late
        assert got["agreed"] == 7
        assert got["collected"] == {"0": "x", "1": "x", "2": "x"}
        assert got["mean"] == 1.0
        # statistics are each rank's own in training, and the first rank's once another set of weights trains
        assert got["own_mean"] == 0.75 * rank
        assert got["rewrapped_mean"] == 0.0
        assert got["kept"]
        assert got["remade"]
        # twice the mean of inputs (1, 2, 3), through weights of one; nothing for what is frozen
        assert got["gradients"] == [[False, 2.0], [False, 2.0], [16.0, 2.0]]
        assert got["drawn"][0] == got["drawn"][2] != got["drawn"][1]
        assert all(got["drawn"] != other["drawn"] for other in measured[:rank])


def test_the_arguments_of_a_run_are_not_parsed_as_those_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    """Such as --run as its --run-path."""
    parsed: list[Any] = []
    monkeypatch.setattr(torch.distributed.run, "run", parsed.append)
    words = [*made.words("torchrun"), "--gpus=2", "--run=x", "--from=best.pt"]
    for more in ([], ["--nodes", "1:2", "--head", "first:29400"]):
        assert main([*words, *more]) == 0
        got = parsed.pop()
        assert (got.module, got.training_script, got.nproc_per_node) == (True, "resolute", "2")
        assert (got.nnodes, got.rdzv_endpoint) == (("1:2", "first:29400") if more else ("1:1", ""))
        assert (got.max_restarts, got.training_script_args) == (0, [*words, *more])  # --from: none


@pytest.mark.parametrize(
    ("gpus", "more", "message"),
    [
        (
            0,
            ["--gpus", "1"],
            "--gpus: got 1, expected at most 0, the GPUs of this machine; lower it, or add --device cpu",
        ),
        (2, ["--gpus", "3"], "--gpus: got 3, expected at most 2, the GPUs of this machine; lower it\n"),
        (2, ["--restarts", "2"], "--restarts: has no effect, got no --gpus"),
        (2, ["--gpus", "2", "--nodes", "2"], "--nodes: got 2 without --head"),
        (2, ["--gpus", "2"], "r.toml: no readable recipe"),
    ],
)
def test_processes_that_cannot_be_started_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpus: int, more: list[str], message: str
) -> None:
    FakeCuda(devices=gpus).install(monkeypatch)
    assert main(["train", "--shards=s", "--recipe=r.toml", *more]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("ends", "status", "starts"),
    [
        ([{0: 2, 1: 2}], 2, 1),  # explained: it would occur again
        ([{1: 2, 0: 75}], 2, 1),  # rank 0 has lost rank 1, which says why
        ([{1: -9, 0: 75}, {}], 0, 2),  # killed
        ([{0: 1}] * 4, 1, 4),  # a bug or a full disk, four times
        ([{0: -11}] * 4, 128 + 11, 4),
    ],
)
def test_only_accidents_start_all_processes_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: list[dict[int, int]], status: int, starts: int
) -> None:
    left, started = list(ends), list[Any]()

    def run(arguments: Any) -> None:
        started.append(arguments)
        if end := left.pop(0):
            failures = {
                rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="") for rank, code in end.items()
            }
            raise ChildFailedError("resolute", failures)

    FakeCuda(devices=2).install(monkeypatch)
    monkeypatch.setattr(launch_module.torchrun, "run", run)
    monkeypatch.setattr(launch_module.ShardSet, "open", lambda *_, **__: contextlib.nullcontext())
    recipe = tmp_path / "r.toml"
    recipe.write_text("[[stages]]\nres = 32\nepochs = 1\nbatch_size = 8\n")
    assert main(["train", "--shards=s", f"--recipe={recipe}", "--gpus", "2"]) == status
    assert len(started) == starts
    assert {each.max_restarts for each in started} == {0}


def test_processes_that_share_a_gpu_are_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RESOLUTE_SHARE_GPU", "1")
    FakeCuda(devices=1).install(monkeypatch)
    started: list[Any] = []
    monkeypatch.setattr(launch_module.torchrun, "run", started.append)
    monkeypatch.setattr(launch_module.ShardSet, "open", lambda *_, **__: contextlib.nullcontext())
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[model]\nname = "test_resnet"\n[optim]\nlr = 0.1\n[[stages]]\nres = 32\nepochs = 1\nbatch_size = 8\n'
    )
    assert main(["train", "--shards=s", f"--recipe={recipe}", "--gpus", "2"]) == 0
    assert [each.nproc_per_node for each in started] == ["2"]


@pytest.mark.slow
def test_a_compiled_network_averages_gradients_during_the_backward_pass_and_compiles_only_in_the_warm_up(
    tmp_path: Path, forked: Callable[..., Ended]
) -> None:
    done = forked("tests.support.ranks_driver", json.dumps([[2, 0, str(tmp_path), "compiled", -1]]))
    assert done.status == 0, done.err
    for rank in range(2):
        got = json.loads((tmp_path / f"compiled{rank}").read_text())
        # training is cut at the two buckets; validation of images and mirror images is not
        assert got["graphs"] == [4, 4, 4]
        assert got["ready"].count("bucket") == 2
        assert "gradient" in got["ready"][got["ready"].index("bucket") :]


def launched(scratch: Path, words: list[str]) -> Command:
    """`resolute train --gpus 2`, in a process group of its own as in a terminal."""
    return Command("resolute", [*words, "--gpus", "2"], folder=ROOT, scratch=scratch)


@pytest.mark.slow
def test_ctrl_c_in_a_run_of_two_processes_ends_in_a_line_that_says_how_to_resume(made: Made, tmp_path: Path) -> None:
    (tmp_path / "equal.toml").write_text(EARLY.replace("patience = 1, min_delta = 0.99", "patience = 0"))
    command = launched(tmp_path, made.words("ctrl-c", "--recipe", str(tmp_path / "equal.toml")))
    command.wait_for("warmed up", seconds=200)
    os.killpg(command.pid, signal.SIGINT)
    ended = command.end()
    assert ended.status == 130
    assert "stopped by SIGINT and saved at batch" in ended.out
    assert "Traceback" not in ended.err
    assert ended.err.splitlines()[-1] == (
        "resolute train: SIGINT: all processes have ended; run the same command to resume from the last checkpoint"
    )
    assert (made.folder / "ctrl-c" / "equal" / "last.pt").exists()


@pytest.mark.slow
def test_an_error_in_a_run_of_two_processes_ends_without_a_traceback(made: Made, tmp_path: Path) -> None:
    ended = launched(tmp_path, made.words("error", "--from", "nothing.pt")).end()
    assert ended.status == 2
    assert "Traceback" not in ended.err
    assert "nothing" in ended.err


def test_a_rank_takes_its_own_gpu_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeCuda(devices=2).install(monkeypatch)
    assert pick_device("cuda", Ranks(rank=1, world_size=2, local_rank=1)) == torch.device("cuda", 1)
    assert driver.current == 1
    for wanted, message in (("cuda:1", "got cuda:1 for 4 ranks"), ("cuda", "got 2 GPUs on this machine")):
        with pytest.raises(ResoluteError, match=message):
            Ranks(rank=3, world_size=4, local_rank=2).device(wanted)
    monkeypatch.setenv("RESOLUTE_SHARE_GPU", "1")
    assert Ranks(rank=3, world_size=4, local_rank=3).device("cuda") == torch.device("cuda", 1)
    FakeCuda(devices=0).install(monkeypatch)
    with pytest.raises(ResoluteError, match="got 0 GPUs on this machine"):
        Ranks(rank=1, world_size=2, local_rank=1).device("cuda")
    monkeypatch.delenv("RESOLUTE_SHARE_GPU")
    with pytest.raises(ResoluteError, match=r"got no GPU for 2 ranks \(GPUS\), .* --device cpu \(make: DEVICE=cpu\)"):
        pick_device("auto", Ranks(rank=0, world_size=2, local_rank=0))
    with pytest.raises(ResoluteError):
        pick_device("cuda", Ranks(rank=0, world_size=2, local_rank=0))
    assert pick_device("cpu", Ranks(rank=0, world_size=2, local_rank=0)) == torch.device("cpu")
