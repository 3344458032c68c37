"""What a benchmark of cut runs says is what the runs left: losses, weights, and which samples were seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.resume import Run, compared
from pipeline.errors import ResoluteError

PLANNED = {0: frozenset({1, 2, 3}), 1: frozenset({4, 5, 6})}


def left(
    folder: Path, *, losses: tuple[float, ...] = (2.0, 1.0), weight: float = 0.5, ids: tuple[int, ...] = (4, 5)
) -> Run:
    """A run of two ranks, of which the first was killed once after step 0."""
    run = Run(folder, Path("shards"), Path("recipe.toml"))
    run.folder.mkdir()
    lines = [{"kind": "step", "step": step, "loss": loss} for step, loss in enumerate(losses)]
    (run.folder / "run.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    torch.save({"model": {"w": torch.tensor([weight])}, "ema": {"w": torch.tensor([-3.0])}}, run.folder / "last.pt")
    lives = {"0.old": [[0, [1, 2], 9]], "0": [[0, [1, 2], 8], [1, list(ids), 8]], "1": [[0, [3], 7], [1, [6], 7]]}
    for name, steps in lives.items():
        (folder / f"seen.{name}").write_text("".join(f"{json.dumps(step)}\n" for step in steps) + '{"torn')
    return run


def test_a_cut_run_that_is_the_whole_one_is_told_so(tmp_path: Path) -> None:
    got = compared(left(tmp_path / "cut"), left(tmp_path / "whole"), PLANNED)
    assert got == {"steps": 2, "same_steps": True, "loss_apart_max_frac": 0.0, "weights_apart_max": 0.0,
                   "weights_max": 3.0, "planned_samples": True}  # fmt: skip


def test_every_difference_is_told(tmp_path: Path) -> None:
    whole = left(tmp_path / "whole")
    assert compared(left(tmp_path / "a", losses=(2.0, 1.25)), whole, PLANNED)["loss_apart_max_frac"] == 0.25
    assert compared(left(tmp_path / "b", weight=0.75), whole, PLANNED)["weights_apart_max"] == 0.25
    assert not compared(left(tmp_path / "c", ids=(4, 7)), whole, PLANNED)["planned_samples"]
    assert not compared(left(tmp_path / "d"), whole, {**PLANNED, 2: frozenset({1})})["planned_samples"]
    short = left(tmp_path / "e", losses=(2.0,))
    assert not compared(short, whole, PLANNED)["same_steps"]


def test_a_run_that_fails_ends_with_its_last_line(tmp_path: Path) -> None:
    run = Run(tmp_path / "x", tmp_path / "none", tmp_path / "none.toml")
    with pytest.raises(ResoluteError, match=r"none: ended with status 2, expected 0: error: .*none\.toml"):
        run.go(1)
