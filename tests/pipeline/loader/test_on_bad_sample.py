"""Damaged samples with `on_bad_sample="skip"`: replaced in the same way in every run, counted and logged."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Augment, Stage
from tests.support import reference
from tests.support.damage import damage_sample

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MIXED = Augment(scale=(0.3, 1.0), policy="randaugment", mixup_alpha=0.8, cutmix_alpha=1.0, mixup_prob=0.8)


@pytest.fixture
def root(shard_root: Path, tmp_path: Path) -> Path:
    """A copy of the shard set, to be damaged."""
    return Path(shutil.copytree(shard_root, tmp_path / "copy"))


def _damage(root: Path, split: str, res: int, samples: list[int]) -> None:
    shards = ShardSet.open(root)
    for sample in samples:
        damage_sample(shards, sample, split=split, res=res)


def test_a_skipped_sample_is_replaced_by_the_next_intact_sample(
    shard_set: ShardSet, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In training and validation, at its resolution only; other batches and those of a resumed run do not change."""
    _damage(root, "train", 32, [10, 11, 74])
    _damage(root, "val", 32, [14])
    stages = [Stage(res=res, epochs=2, batch_size=16, augment=MIXED) for res in (32, 48)]
    plan, sound = (Plan(shards, stages, seed=5, eval_batch_size=7) for shards in (ShardSet.open(root), shard_set))
    places = {("train", 32): {10: 12, 11: 12, 74: 0}, ("val", 32): {14: 0}}
    start = plan.phases[2].first + 1
    with Loader(plan, on_bad_sample="skip") as loader:
        batches = list(loader)
        assert set(loader.skipped) == {(*place, i) for place, replaced in places.items() for i in replaced}
        assert all("is damaged, got CRC-32" in reason for reason in loader.skipped.values())
        loader.load_state_dict({"next_batch": start})
        assert torch.equal(next(loader).images, batches[start].images)
    assert len(batches) == plan.total_batches
    for batch in batches:
        spec, planned = batch.spec, sound.batch(batch.spec.index)
        replacements = places.get((spec.split, spec.res), {})
        assert spec.ids.tolist() == [replacements.get(i, i) for i in planned.ids.tolist()]
        np.testing.assert_array_equal(batch.labels, shard_set.splits[spec.split].samples[spec.ids]["label"])
        twin = sound.batch(spec.index, replacements=replacements)
        np.testing.assert_array_equal(spec.crops, twin.crops)
    with Loader(plan, on_bad_sample="skip", start=start) as again:
        for expected in batches[start : start + 8]:
            assert torch.equal(next(again).images, expected.images)
    assert sum("sample 12 in its place" in message for message in caplog.messages) >= 2


def test_a_replacement_that_is_damaged_later_is_replaced_too(root: Path) -> None:
    _damage(root, "train", 32, [10])
    plan = Plan(ShardSet.open(root), [Stage(res=32, epochs=12, batch_size=25)], eval_batch_size=None)
    with Loader(plan, on_bad_sample="skip") as loader:
        for _ in range(5):
            next(loader)
        _damage(root, "train", 32, [11, 12])
        rest = list(loader)
    for batch in rest[-9:]:  # the last three epochs
        assert not {10, 11, 12} & set(batch.spec.ids.tolist())
        expected = np.stack([reference.view(plan.shards, batch.spec, i) for i in range(len(batch.spec))])
        pixels = (batch.images.permute(0, 2, 3, 1).numpy().astype(np.float64) * STD + MEAN) * 255
        assert np.abs(pixels - expected).mean(axis=(1, 2, 3)).max() < 2  # those of the replacements
    assert sum(batch.spec.ids.tolist().count(13) for batch in rest[-9:]) == 3 * 4


def test_a_split_without_an_intact_sample_is_an_error(root: Path) -> None:
    plan = Plan(ShardSet.open(root), [Stage(res=32, epochs=2, batch_size=16)], eval_batch_size=None)
    with Loader(plan, on_bad_sample="skip") as loader:
        next(loader)
        for tar in (root / "32").glob("train-*.tar"):
            tar.write_bytes(b"")
        with pytest.raises(ResoluteError, match=r"is damaged, got 0 bytes.*nor can the 74 samples after it be read"):
            list(loader)
