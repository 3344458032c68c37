"""Targets that are several classes or numbers: mixed as the images are, balanced over folds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.dataset.target import Target
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Augment, Stage
from tests.support.retarget import retarget

CLASSES = tuple(f"c{i}" for i in range(11))  # more than one byte of bits
RNG = np.random.default_rng(3)
LABELS = {
    name: [np.flatnonzero(RNG.random(11) < 0.2).tolist() for _ in range(n)] for name, n in (("train", 75), ("val", 15))
}
VALUES = {name: RNG.normal(0, 1e3, (n, 2)).astype(np.float32) for name, n in (("train", 75), ("val", 15))}
KINDS: dict[str, tuple[Target, dict[str, Any]]] = {
    "labels": (Target(kind="labels", names=CLASSES), LABELS),
    "values": (Target(kind="values", names=("age", "mass"), units=("a", "kg")), VALUES),
}


def dense(kind: str, split: str) -> np.ndarray:
    """(N, C) or (N, D) float32, computed without `Target`."""
    if kind == "values":
        return VALUES[split]
    return np.array([[float(c in row) for c in range(11)] for row in LABELS[split]], np.float32)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def shards(kind: str, shard_root: Path, tmp_path: Path) -> ShardSet:
    root = Path(shutil.copytree(shard_root, tmp_path / "set"))
    return retarget(root, *KINDS[kind])


def test_targets_are_mixed_as_the_images_are(kind: str, shards: ShardSet) -> None:
    mixing = Augment(mixup_alpha=0.8, mixup_mode="elem")
    plan = Plan(shards, [Stage(res=32, epochs=1, batch_size=16, augment=mixing)], eval_batch_size=8)
    seen = set()
    with Loader(plan) as loader:
        for batch in loader:
            own = torch.from_numpy(dense(kind, batch.spec.split)[batch.spec.ids])
            lam = torch.from_numpy(batch.spec.lam)[:, None]
            expected = lam * own + (1 - lam) * own[torch.from_numpy(batch.spec.partners).long()]
            assert batch.targets.dtype == torch.float32
            torch.testing.assert_close(batch.targets, expected)
            assert len(batch.partner_labels) == 0
            seen.add((batch.spec.split, bool((lam < 1).any())))
            with pytest.raises(ResoluteError, match=r"use Batch\.targets"):
                _ = batch.labels
            assert batch.soft_targets(batch.targets.shape[1]) is batch.targets
            with pytest.raises(ResoluteError, match=r"use Batch\.targets"):
                batch.soft_targets(batch.targets.shape[1], smoothing=0.1)
    assert seen == {("train", True), ("val", False)}


def test_folds_share_out_rare_labels_evenly(kind: str, shards: ShardSet) -> None:
    folds = [shards.with_fold(fold, 5) for fold in range(5)]
    assert [len(fold.splits["val"]) for fold in folds] == [15] * 5
    if kind == "labels":
        whole = dense(kind, "train")
        rarest = whole.sum(0).argmin()
        counts = [fold.target.decode(fold.splits["val"].samples[:])[:, rarest].sum() for fold in folds]
        assert sum(counts) == whole[:, rarest].sum()
        assert max(counts) - min(counts) <= 1
