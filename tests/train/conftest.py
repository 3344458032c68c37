"""Fixtures of the tests of training: a recipe with two stage changes, its command line, and finished runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from resolute.train.logs.metrics import read_log
from tests.conftest import make_photos
from tests.support.cli import prep
from tests.support.quick import shorten


def stages(*tables: tuple[int, int, int]) -> str:
    """The TOML of stages, each (res, epochs, batch size)."""
    lines = "[[stages]]\nres = {}\nepochs = {}\nbatch_size = {}\n"
    return "".join(lines.format(*table) for table in tables)


RECIPE = f"""
seed = 5
model = {{ name = "test_resnet", kwargs = {{ drop_rate = 0.1 }} }}
optim = {{ lr = 0.1, clip_norm = 5.0 }}
loss = {{ label_smoothing = 0.1 }}
ema = {{ decay = 0.9 }}
augment = {{ mixup_alpha = 0.2, cutmix_alpha = 1.0, mixup_prob = 0.5 }}
eval = {{ batch_size = 8 }}
{stages((32, 2, 16))}fraction = 0.5
{stages((48, 1, 8), (64, 2, 12))}fraction = 0.75
"""


@pytest.fixture(scope="session")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(RECIPE)
    return path


def train_words(shards: Path | str, recipe: Path, runs: Path, *more: str) -> list[str]:
    """The command line of a run named after its recipe file in the folder `runs`, on one core."""
    return [
        "train",
        "--shards",
        str(shards),
        "--recipe",
        str(recipe),
        "--run",
        recipe.stem,
        "--runs",
        str(runs),
        "--device",
        "cpu",
        "--threads",
        "1",
        *more,
    ]


def stop_at(monkeypatch: pytest.MonkeyPatch, index: int, *, number: int = 15) -> None:
    """Runs are stopped after batch `index`, as by the signal `number`."""
    from resolute.train import trainer

    after = trainer._Session._after

    def stopping(session: trainer._Session, spec: trainer.BatchSpec) -> bool:
        if spec.index == index:
            session.stopped_by = number
        return after(session, spec)

    monkeypatch.setattr(trainer._Session, "_after", stopping)


@pytest.fixture(scope="session")
def words(shard_root: Path, recipe_file: Path) -> Callable[[Path], list[str]]:
    """words(runs): the command line of the tiny run in the folder `runs`, which saves every 3 steps."""

    def make(runs: Path) -> list[str]:
        return train_words(shard_root, recipe_file, runs, "--save-every-steps", "3")

    return make


def without_clocks(log: Path) -> list[dict[str, Any]]:
    """The log's records without measured times, and without checkpoint records, which depend on time."""
    clocks = (
        "wait_s",
        "compute_s",
        "train_s",
        "eval_s",
        "elapsed_s",
        "unix_s",
        "images_per_s",
        "stall_frac",
        "memory_bytes",
        "gpu_frac",
        "machine",
    )
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return [
        {key: value for key, value in record.items() if key not in clocks}
        for record in records
        if record["kind"] != "checkpoint"
    ]


def epochs_of(run: Path) -> list[dict[str, Any]]:
    """The records of a run's epochs."""
    return [record for record in read_log(run / "run.jsonl") if record["kind"] == "epoch"]


def assert_equal_runs(got: Path, expected: Path) -> None:
    """The same log (whatever was added to the shard set since), position, random state and, to the bit, weights."""
    ours, theirs = (
        [{key: value for key, value in record.items() if key != "shards_hash"} for record in without_clocks(log)]
        for log in (got / "run.jsonl", expected / "run.jsonl")
    )
    assert ours == theirs
    state, other = (torch.load(folder / "last.pt", weights_only=True) for folder in (got, expected))
    for part in ("model", "ema"):
        for name, tensor in (other[part] or {}).items():
            assert torch.equal(state[part][name], tensor), (part, name)
    assert torch.equal(state["rng"], other["rng"])
    assert state["position"] == other["position"]


SMALL = f"""
seed = 3
model = {{ name = "test_resnet" }}
optim = {{ lr = 0.001 }}
ema = {{ decay = 0.5 }}
precision = {{ amp = "off" }}
eval = {{ batch_size = 8, flip = true }}
{stages((32, 1, 16), (48, 2, 16))}"""


@pytest.fixture(scope="session")
def trained(shard_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run with EMA, two resolutions and test-time flip; read-only."""
    from resolute.cli import main

    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.toml").write_text(SMALL)
    assert main(train_words(shard_root, folder / "small.toml", folder)) == 0
    return folder / "small"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starter recipes with one epoch of each stage, and measurements of `resolute plan` of a few steps."""
    shorten(monkeypatch)


@pytest.fixture(scope="session")
def folded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a set without validation split, s, its photos, and the recipe cv.toml; read-only."""
    folder = tmp_path_factory.mktemp("folded")
    make_photos(folder / "photos", each=10)
    words = ["--src", folder / "photos", "--out", folder / "s", "--res", "32", "--val-frac", "0", "--workers", "1"]
    assert prep([str(word) for word in words]) == 0
    (folder / "cv.toml").write_text(f"""
model = {{ name = "test_resnet" }}
optim = {{ lr = 0.001 }}
precision = {{ amp = "off" }}
{stages((32, 1, 8))}""")
    return folder
