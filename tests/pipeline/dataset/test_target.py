"""Targets that are several classes or numbers: mixed as the images are, balanced over folds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet, _joined
from resolute.pipeline.dataset.target import IGNORED, Target
from resolute.pipeline.loader.loader import Loader, mix_targets
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Augment, Stage
from tests.support.retarget import retarget

CLASSES = tuple(f"c{i}" for i in range(11))  # more than one byte of bits
RNG = np.random.default_rng(3)
LABELS = {
    name: [np.flatnonzero(RNG.random(11) < 0.2).tolist() for _ in range(n)] for name, n in (("train", 75), ("val", 15))
}
VALUES = {name: RNG.normal(0, 1e3, (n, 2)).astype(np.float32) for name, n in (("train", 75), ("val", 15))}
STATES = {name: RNG.choice([0, 1, -1], (len(rows), 11), p=[0.5, 0.2, 0.3]) for name, rows in LABELS.items()}
IGNORING = {
    name: [[*np.flatnonzero(row == 1), *(IGNORED + np.flatnonzero(row == -1))] for row in rows]
    for name, rows in STATES.items()
}
KINDS: dict[str, tuple[Target, dict[str, Any]]] = {
    "labels": (Target(kind="labels", names=CLASSES), LABELS),
    "ignored": (Target(kind="labels", names=CLASSES, ignored=True), IGNORING),
    "values": (Target(kind="values", names=("age", "mass"), units=("a", "kg")), VALUES),
}


def dense(kind: str, split: str) -> np.ndarray:
    """(N, C) or (N, D) float32, computed without `Target`."""
    if kind == "values":
        return VALUES[split]
    if kind == "ignored":
        return STATES[split].astype(np.float32)
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
            partner = own[torch.from_numpy(batch.spec.partners).long()]
            expected = lam * own + (1 - lam) * partner
            if kind == "ignored":
                expected[((own == -1) & (lam > 0)) | ((partner == -1) & (lam < 1))] = -1
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
    if kind != "values":
        whole = dense(kind, "train") == 1
        rarest = whole.sum(0).argmin()
        counts = [(fold.target.decode(fold.splits["val"].samples[:])[:, rarest] == 1).sum() for fold in folds]
        assert sum(counts) == whole[:, rarest].sum()
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("lam", [1.0, 0.7, 0.0])
def test_a_mixed_label_is_ignored_if_an_image_that_is_seen_ignores_it(shard_set: ShardSet, lam: float) -> None:
    plan = Plan(shard_set, [Stage(res=32, epochs=1, batch_size=2)])
    spec = plan.batch(0)
    spec.rows["lam"], spec.rows["partner"] = lam, (1, 0)
    targets = np.array([[1, 0, -1, -1, 0], [0, 1, 1, -1, -1]], np.float32)
    mixed = mix_targets(targets, spec, ignored=True)
    assert mixed[0] == pytest.approx({1.0: targets[0], 0.7: [0.7, 0.3, -1, -1, -1], 0.0: targets[1]}[lam])


def test_ignored_labels_are_neither_counted_as_present_nor_lost_when_classes_are_added() -> None:
    target, rows = KINDS["ignored"][0], IGNORING["train"]
    states = STATES["train"]
    records = target.encode(range(len(rows)), rows)
    assert records.dtype["labels"].shape == (2, 2)
    np.testing.assert_array_equal(target.decode(records), states)
    np.testing.assert_array_equal(target.counts(records), (states == 1).sum(0))
    np.testing.assert_array_equal(target.ignored_counts(records), (states == -1).sum(0))
    present = Target(kind="labels", names=CLASSES)
    plain = present.encode(range(len(rows)), [np.flatnonzero(row == 1) for row in states])
    np.testing.assert_array_equal(target.strata(records), present.strata(plain))
    assert not present.ignored_counts(plain).any()
    more = Target(kind="labels", names=tuple(f"c{i}" for i in range(30)), ignored=True)
    wide = _joined([records], more.sample_dtype)
    np.testing.assert_array_equal(more.decode(wide)[:, :11], states)
    assert not more.decode(wide)[:, 11:].any()
    assert len(target.encode([], [])) == 0


def test_the_table_of_a_target_says_whether_labels_are_ignored_only_if_they_may_be() -> None:
    target = KINDS["ignored"][0]
    assert target.to_json() == {"kind": "labels", "ignored": True}
    assert Target.from_manifest({"target": target.to_json(), "classes": CLASSES}) == target
    assert KINDS["labels"][0].to_json() == {"kind": "labels"}
    assert not Target.from_manifest({"target": {"kind": "labels"}, "classes": CLASSES}).ignored
