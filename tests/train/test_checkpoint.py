"""A checkpoint is whole, its own, and of this recipe, or it is refused by name."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import ResoluteError
from train import checkpoint

IDENTITY = {"recipe": {"optim": {"lr": 0.5}, "stages": [{"res": 32}]}, "shards": "abc"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "last.pt", {**IDENTITY, "weights": torch.arange(1000.0)})
    return tmp_path / "last.pt"


def test_state_comes_back_equal_and_leaves_no_part_file(saved: Path) -> None:
    state = checkpoint.load(saved, expect=IDENTITY)
    assert torch.equal(state["weights"], torch.arange(1000.0))
    assert [file.name for file in saved.parent.iterdir()] == ["last.pt"]


def test_another_recipe_is_refused_with_what_differs(saved: Path) -> None:
    other = {"recipe": {"optim": {"lr": 0.5}, "stages": [{"res": 64}]}, "shards": "abc"}
    with pytest.raises(ResoluteError, match=r"another recipe: recipe\.stages\[0\]\.res got 32, expected 64"):
        checkpoint.load(saved, expect=other)
    with pytest.raises(ResoluteError, match=r"made with another shards: shards got 'abc', expected 'xyz'"):
        checkpoint.load(saved, expect={**IDENTITY, "shards": "xyz"})


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "foreign"])
def test_damaged_and_foreign_files_are_refused_by_name(saved: Path, damage: str) -> None:
    data = saved.read_bytes()
    if damage == "cut":
        saved.write_bytes(data[: len(data) // 2])
    elif damage == "text":
        saved.write_text("not a checkpoint")
    elif damage == "empty":
        saved.write_bytes(b"")
    else:
        torch.save({"state_dict": {}}, saved)
    with pytest.raises(ResoluteError, match=r"last\.pt: damaged or no checkpoint"):
        checkpoint.load(saved, expect=IDENTITY)


def test_foreign_code_is_not_run(saved: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(saved.parent / "pwned"),)

    torch.save({"format": checkpoint.FORMAT, "x": Evil()}, saved)
    with pytest.raises(ResoluteError, match="damaged or no checkpoint"):
        checkpoint.load(saved, expect={})
    assert not (saved.parent / "pwned").exists()


def test_a_full_disk_keeps_the_previous_checkpoint(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResoluteError, match=r"last\.pt: checkpoint not written \(No space left"):
        checkpoint.save(saved, {**IDENTITY, "weights": torch.zeros(3)})
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir()] == ["last.pt"]


def test_best_stays_what_it_was_when_last_moves_on(saved: Path) -> None:
    best = saved.with_name("best.pt")
    checkpoint.mark_best(saved, best)
    checkpoint.save(saved, {**IDENTITY, "weights": torch.zeros(3)})
    assert len(checkpoint.load(best, expect=IDENTITY)["weights"]) == 1000
    checkpoint.mark_best(saved, best)
    assert len(checkpoint.load(best, expect=IDENTITY)["weights"]) == 3
