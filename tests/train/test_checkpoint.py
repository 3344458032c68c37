"""Checkpoints: complete, of the same recipe and data, or refused by name with another one suggested."""

from __future__ import annotations

import errno
import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from resolute.errors import ResoluteError, StorageError
from resolute.train import checkpoint

IDENTITY = {"recipe": {"optim": {"lr": 0.5}, "stages": [{"res": 32}]}, "shards": "abc"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "last.pt", {**IDENTITY, "weights": torch.arange(1000.0)})
    return tmp_path / "last.pt"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run after three saves, of which two are kept."""
    (tmp_path / "run.jsonl").write_bytes(b"x" * 50)
    for step in (10, 20, 30):
        file = checkpoint.step_file(tmp_path, step)
        checkpoint.save(file, {**IDENTITY, "step": step, "meter": {"log_bytes": step}})
        checkpoint.link(file, tmp_path / "last.pt")
        checkpoint.keep_newest(tmp_path, 2, newest=step)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name != "run.jsonl")


def test_the_digest_equals_the_files_and_torch_and_zip_can_read_it(saved: Path) -> None:
    digest = checkpoint.save(saved, {**IDENTITY, "weights": torch.ones(3)})
    assert digest == hashlib.sha256(saved.read_bytes()).hexdigest()
    state = checkpoint.load(saved, expect=IDENTITY)
    assert (state["sha256"], state["weights"].tolist()) == (digest, [1, 1, 1])
    assert torch.load(saved, weights_only=True, mmap=True)["weights"].tolist() == [1, 1, 1]
    with zipfile.ZipFile(saved) as file:
        assert file.testzip() is None
    assert names(saved.parent) == ["last.pt"]


def test_another_recipe_or_other_data_is_refused_with_the_differences_but_an_extended_set_is_accepted(
    saved: Path,
) -> None:
    other = {"recipe": {"optim": {"lr": 0.5}, "stages": [{"res": 64}]}, "shards": "abc"}
    with pytest.raises(ResoluteError, match=r"another recipe: stages\[0\]\.res: the run has 32, the recipe 64"):
        checkpoint.load(saved, expect=other)
    data = {"classes": "1", "train images at 32 px": "2", "train samples and labels": "3"}
    checkpoint.save(saved, {**IDENTITY, "data": data})
    assert checkpoint.load(saved, expect={**IDENTITY, "shards": "another manifest", "data": data})
    with pytest.raises(ResoluteError) as error:
        checkpoint.load(saved, expect={**IDENTITY, "data": {**data, "train images at 32 px": "x", "fold": "1 of 3"}})
    assert "got a set that differs in train images at 32 px, fold (equal: classes, train samples and labels)" in str(
        error.value
    )


@pytest.mark.parametrize("damage", ["cut", "foreign", "one bit"])
def test_damaged_files_and_other_formats_are_refused_by_name(saved: Path, damage: str) -> None:
    data = bytearray(saved.read_bytes())
    if damage == "cut":
        saved.write_bytes(data[: len(data) // 2])
    elif damage == "one bit":
        data[data.index(torch.tensor(500.0).numpy().tobytes())] ^= 1
        saved.write_bytes(data)
        assert torch.load(saved, weights_only=True)["weights"][500] != 500  # torch alone does not detect it
    else:
        torch.save({"state_dict": {}}, saved)
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"last\.pt: damaged, or not a checkpoint"):
        checkpoint.load(saved, expect=IDENTITY)


def test_code_in_a_checkpoint_is_not_executed(saved: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(saved.parent / "pwned"),)

    checkpoint.save(saved, {"x": Evil()})
    with pytest.raises(checkpoint.DamagedCheckpoint, match="damaged, or not a checkpoint"):
        checkpoint.load(saved, expect={})
    assert not (saved.parent / "pwned").exists()


def test_an_io_error_is_reported_as_unavailable_and_deletes_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:  # the file
        patch.setattr(Path, "open", fail)
        for read in (
            lambda: checkpoint.load(run / "last.pt", expect=IDENTITY),
            lambda: checkpoint.resume(run / "last.pt", expect=IDENTITY),
            lambda: checkpoint.peek(run / "last.pt", "step"),
        ):
            with pytest.raises(StorageError, match=os.strerror(errno.EIO)) as error:
                read()
            assert "delete" not in str(error.value)
            assert "damaged or" not in str(error.value)
    with monkeypatch.context() as patch:  # the folder: a run with checkpoints never looks like one without
        patch.setattr(os, "listdir", fail)
        patch.setattr(os, "scandir", fail)
        for read in (
            lambda: checkpoint.resume(run / "last.pt", expect=IDENTITY),
            lambda: checkpoint.newest(run, "last.pt"),
        ):
            with pytest.raises(StorageError, match=os.strerror(errno.EIO)):
                read()
    assert checkpoint.load(run / "last.pt", expect=IDENTITY)["step"] == 30


@pytest.mark.parametrize("links", [True, False])
def test_best_does_not_change_when_last_is_overwritten(
    saved: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    best = saved.with_name("best.pt")
    checkpoint.link(saved, best)
    checkpoint.save(saved, {**IDENTITY, "weights": torch.zeros(3)})
    assert len(checkpoint.load(best, expect=IDENTITY)["weights"]) == 1000
    checkpoint.link(saved, best)
    assert len(checkpoint.load(best, expect=IDENTITY)["weights"]) == 3


def test_the_newest_are_kept_and_those_of_an_abandoned_branch_deleted(run: Path) -> None:
    assert names(run) == ["last.pt", "step-00000020.pt", "step-00000030.pt"]
    checkpoint.save(checkpoint.step_file(run, 25), {**IDENTITY, "step": 25})  # after going back to step 20
    checkpoint.keep_newest(run, 2, newest=25)
    assert names(run) == ["last.pt", "step-00000020.pt", "step-00000025.pt"]


def test_a_damaged_or_missing_last_checkpoint_suggests_the_newest_intact_one(run: Path) -> None:
    data = bytearray((run / "last.pt").read_bytes())
    data[len(data) // 2] ^= 255
    (run / "last.pt").write_bytes(data)  # also its other hard link, step 30
    message = r"last\.pt: damaged, .*; step-00000020\.pt \(step 20\) is good: .*--from step-00000020\.pt"
    with pytest.raises(checkpoint.DamagedCheckpoint, match=message):
        checkpoint.resume(run / "last.pt", expect=IDENTITY)
    state = checkpoint.resume(run / "step-00000020.pt", expect=IDENTITY)
    assert state is not None
    assert state["step"] == 20
    (run / "last.pt").unlink()
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"last\.pt: not found.*step-00000020\.pt .* is good"):
        checkpoint.resume(run / "last.pt", expect=IDENTITY)
    for file in run.glob("*.pt"):
        file.write_text("gone")
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"use another RUN$"):
        checkpoint.resume(run / "last.pt", expect=IDENTITY)
    for file in run.glob("*.pt"):
        file.unlink()
    assert checkpoint.resume(run / "last.pt", expect=IDENTITY) is None  # a new run


def test_a_log_that_is_shorter_than_at_the_checkpoint_is_refused(run: Path) -> None:
    (run / "run.jsonl").write_bytes(b"x" * 29)
    with pytest.raises(ResoluteError, match=r"run\.jsonl: truncated or missing, got 29 bytes, expected 30"):
        checkpoint.resume(run / "last.pt", expect=IDENTITY)
