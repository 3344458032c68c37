"""Early stopping, and the end of a run whose loss or weights are not finite."""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from resolute.cli import main
from resolute.pipeline.dataset.format import key_name
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.batch import Batch
from resolute.pipeline.plan.plan import Plan
from resolute.train import learner as learners
from resolute.train.early_stopping import BestSoFar
from resolute.train.recipe.schema import Recipe, Stop
from resolute.train.recipe.stages import RecipeStage
from resolute.train.score import best_score
from tests.train.conftest import SMALL, stop_at, train_words, without_clocks


def stages_of(*sizes: int, epochs: int = 1) -> list[RecipeStage]:
    """A stage of `epochs` epochs for each run of equal `sizes`."""
    return [RecipeStage(res=res, epochs=epochs * len([*run]), batch_size=8) for res, run in itertools.groupby(sizes)]


def stopped_at(
    top1: list[float], *, ema: list[float] | None = None, every: int = 1, res: list[int] | None = None, **stop: Any
) -> tuple[int, int]:
    """(epoch of the stop, or -1, best epoch) of validations every `every` epochs, in a stage for each run of
    equal `res`; None: in one."""
    best_so_far = BestSoFar(Stop(**stop), stages_of(*res) if res else stages_of(224, epochs=every * len(top1)))
    for i, value in enumerate(top1):
        record: dict[str, Any] = {"epoch": (i + 1) * every - 1, "top1": value, "ema_top1": ema[i] if ema else None}
        best_so_far.update(record)
        if best_so_far.ended or best_so_far.stage_ended:
            return record["epoch"], best_so_far.best_epoch
    return -1, best_so_far.best_epoch


def test_a_run_stops_after_patience_validations_without_improvement() -> None:
    rising_then_flat = [0.1, 0.3, 0.5, 0.5, 0.4, 0.5, 0.6]
    assert stopped_at(rising_then_flat, patience=3) == (5, 2)
    assert stopped_at(rising_then_flat, patience=4) == (-1, 6)
    assert stopped_at(rising_then_flat) == (-1, 6)
    assert stopped_at(rising_then_flat, patience=3, every=2) == (11, 5)  # validations, not epochs


def test_an_improvement_below_min_delta_does_not_reset_patience_but_is_the_best() -> None:
    creeping = [0.50, 0.504, 0.508, 0.512, 0.516]
    assert stopped_at(creeping, patience=2, min_delta=0.01) == (2, 2)
    assert stopped_at(creeping, patience=2, min_delta=0.001) == (-1, 4)


def test_the_best_epoch_is_chosen_at_the_last_resolution() -> None:
    small_then_large = [128, 128, 224, 224, 224]
    assert stopped_at([0.5, 0.9, 0.6, 0.7, 0.65], res=small_then_large) == (-1, 3)
    up_and_down = [128, 224, 160, 160, 224]  # a result at the last resolution stays ahead of smaller ones
    assert stopped_at([0.5, 0.8, 0.9, 0.95, 0.7], res=up_and_down) == (-1, 1)
    assert stopped_at([0.5, 0.8, 0.9, 0.95, 0.85], res=up_and_down) == (-1, 4)


def test_every_stage_starts_with_its_full_patience() -> None:
    """Also if only the trained layers change: a stage that trains the head alone does not end the next one."""
    head_only, whole = (RecipeStage(res=224, epochs=4, batch_size=8, train_from=name) for name in ("head", None))
    best_so_far, ended = BestSoFar(Stop(patience=3), [head_only, whole]), []
    for epoch, top1 in enumerate([0.5, 0.6, 0.6, 0.6, 0.55, 0.5, 0.5, 0.7]):
        best_so_far.update({"epoch": epoch, "top1": top1, "ema_top1": None})
        ended.append(bool(best_so_far.ended or best_so_far.stage_ended))
    assert ended == [False] * 8  # without the restart, after epoch 4
    assert best_so_far.best_epoch == 7


def test_patience_ends_a_stage_and_the_run_only_in_the_last_one() -> None:
    best_so_far, found = BestSoFar(Stop(patience=2), stages_of(128, 160, 224, epochs=5)), []
    for epoch in (0, 1, 2, 5, 6, 7, 10, 11, 12):  # the trainer leaves out the rest of a stage
        best_so_far.update({"epoch": epoch, "top1": 0.5, "ema_top1": None})
        found.append((best_so_far.stage_ended, best_so_far.ended))
    no_better = "top-1 no better than 50.00 % in 2 validations"
    assert found == [("", ""), ("", ""), (no_better, "")] * 2 + [("", ""), ("", ""), ("", no_better)]


def test_the_last_epoch_of_a_stage_does_not_end_it_early() -> None:
    best_so_far = BestSoFar(Stop(patience=1), stages_of(128, 224, epochs=2))
    for epoch in range(4):
        best_so_far.update({"epoch": epoch, "top1": 0.5, "ema_top1": None})
        assert (best_so_far.stage_ended, best_so_far.ended) == ("", "")


def test_ema_weights_count_if_they_are_better_and_scores_that_are_not_finite_do_not() -> None:
    assert best_score({"r2": math.nan, "ema_r2": 0.25}) == 0.25
    assert best_score({"r2": math.nan, "ema_r2": None}) is None
    assert stopped_at([0.5, 0.4, 0.4, 0.4], ema=[0.1, 0.2, 0.6, 0.5], patience=2) == (-1, 2)
    best_so_far = BestSoFar(Stop(), stages_of(224))
    best_so_far.update({"epoch": 0, "top1": 0.2, "ema_top1": 0.3})
    assert (best_so_far.best_score, best_so_far.best_weights) == (0.3, "ema")
    again = BestSoFar(Stop(), stages_of(224))
    again.load_state_dict(json.loads(json.dumps(best_so_far.state_dict())))
    assert again.state_dict() == best_so_far.state_dict()


TWO_STAGES = (
    SMALL.replace("lr = 0.001", "lr = 1e-9").replace("epochs = 1", "epochs = 3").replace("epochs = 2", "epochs = 3")
)
STOPPING = TWO_STAGES + "[stop]\npatience = 1\nmin_delta = 0.9\n"


def run(folder: Path, shard_root: Path, text: str, *more: str) -> int:
    (folder / "small.toml").write_text(text)
    return main(train_words(shard_root, folder / "small.toml", folder, *more))


@pytest.mark.slow
def test_an_early_stopped_run_is_complete_and_is_not_continued(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = STOPPING
    assert run(tmp_path, shard_root, text) == 0
    out = capsys.readouterr().out
    assert "stage 0 (32 px) ended early: top-1 no better than" in out
    assert "in 1 validation; next: stage 1 (48 px), epoch 3" in out
    assert "stopped early: top-1 no better than" in out
    assert "best.pt is of epoch" in out
    records = without_clocks(tmp_path / "small" / "run.jsonl")
    assert [r["epoch"] for r in records if r["kind"] == "epoch"] == [0, 1, 3, 4]
    page = (tmp_path / "small/report.html").read_text()
    assert "1 stage ended early" in page
    assert "Stage 0 ended early, after epoch 1: top-1 no better than" in page
    assert records[-1]["kind"] == "end"
    assert records[-1]["stopped_early"].startswith("top-1 no better than")
    before = (tmp_path / "small" / "last.pt").read_bytes()
    assert run(tmp_path, shard_root, text) == 0
    assert "this run stopped early (top-1 no better than" in capsys.readouterr().out
    assert (tmp_path / "small" / "last.pt").read_bytes() == before


@pytest.fixture(scope="module")
def stopping(shard_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two finished runs: `planned`, and `whole`, whose first stage ended early."""
    folder = tmp_path_factory.mktemp("stopping")
    for name, text in (("planned", TWO_STAGES), ("whole", STOPPING)):
        (folder / f"{name}.toml").write_text(text)
        assert main(train_words(shard_root, folder / f"{name}.toml", folder)) == 0
    return folder


def records(run: Path) -> list[dict[str, Any]]:
    return [
        each for each in without_clocks(run / "run.jsonl") if each["kind"] in ("step", "epoch", "stage_ended", "end")
    ]


@pytest.mark.slow
def test_a_stage_after_one_that_ended_early_has_the_steps_and_rates_of_its_place_in_the_plan(stopping: Path) -> None:
    (ended,) = (each for each in records(stopping / "whole") if each["kind"] == "stage_ended")
    planned, got = (
        [
            (each["step"], each["epoch"], each["lr"])
            for each in records(stopping / name)
            if each.get("stage") == 1 and each["kind"] == "step"
        ]
        for name in ("planned", "whole")
    )
    assert got[0][:2] == (ended["next_step"], ended["next_epoch"]) == (15, 3)
    assert got == planned[: len(got)]


@pytest.mark.slow
@pytest.mark.parametrize("at", [12, 13, 21])  # batches: the last two of the stage, and the first of the next
def test_a_stage_that_ended_early_is_resumed_exactly(
    shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopping: Path, at: int
) -> None:
    (tmp_path / "cut.toml").write_text(STOPPING)
    words = train_words(shard_root, tmp_path / "cut.toml", tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, at)
        assert main(words) == 128 + 15
    assert main(words) == 0
    assert records(tmp_path / "cut") == records(stopping / "whole")
    weights = [torch.load(path / "last.pt", weights_only=True) for path in (tmp_path / "cut", stopping / "whole")]
    for kind in ("model", "ema"):
        for name, tensor in weights[0][kind].items():
            assert torch.equal(tensor, weights[1][kind][name]), name


@pytest.mark.slow
@pytest.mark.parametrize("what", ["loss", "weights"])
def test_non_finite_numbers_end_the_run_are_reported_and_not_saved(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """At step 7: the loss is detected at once, weights before they are saved (after step 7, a multiple of 4)."""
    step = learners.Learner.train_step

    def breaking(learner: learners.Learner, batch: Batch) -> Any:
        loss, lr = step(learner, batch)
        if batch.spec.step == 7:
            if what == "loss":
                return loss * math.nan, lr
            with torch.no_grad():
                next(learner.network.parameters())[0, 0] = math.inf
        return loss, lr

    with monkeypatch.context() as patch:
        patch.setattr(learners.Learner, "train_step", breaking)
        assert run(tmp_path, shard_root, SMALL, "--save-every-steps", "4") == 2
    err = capsys.readouterr().err
    assert ("loss is nan" if what == "loss" else "weights are not finite") in err
    assert "at step 7 (epoch 1, 48 px, lr " in err
    recipe, shards = Recipe.parse(tomllib.loads(SMALL), name="x"), ShardSet.open(shard_root)
    plan = Plan(shards, recipe.stages, seed=3, eval_batch_size=8)
    index = next(i for i in range(plan.total_batches) if plan.batch(i).step == 7 and plan.batch(i).split == "train")
    report = json.loads((tmp_path / "small" / "not_finite.json").read_text())
    keys = [key_name(int(key)) for key in shards.splits["train"].samples[plan.batch(index).ids]["key"]]
    assert (report["step"], report["index"], report["keys"]) == (7, index, keys)
    assert ", ".join(keys[:3]) in err
    state = torch.load(tmp_path / "small" / "last.pt", weights_only=True)
    assert state["step"] == 5  # the end of epoch 0
    assert all(value.isfinite().all() for value in state["model"].values())
    assert run(tmp_path, shard_root, SMALL) == 0  # without the fault it is resumed
    losses = [r for r in without_clocks(tmp_path / "small" / "run.jsonl") if r["kind"] == "step"]
    assert [r["step"] for r in losses] == list(range(15))
    assert losses[7]["lr"] == report["lr"]
