"""Damaged samples with `on_bad_sample="skip"`: replaced in the same way in every run, counted and logged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resolute.errors import DamagedSample, ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.loader.reader import EncodedBatch, Reader
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


def test_pixels_and_labels_of_a_batch_use_the_same_replacements(
    shard_set: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches are read concurrently; a sample is damaged in one and was read intact for the other."""
    plan = Plan(shard_set, [Stage(res=32, epochs=3, batch_size=75, augment=Augment(scale=(0.3, 1.0)))],
                eval_batch_size=None)  # fmt: skip
    first, second = 20, 40
    submit, reads = Reader.submit, 0

    def injected(reader: Reader, split: str, res: int, ids: np.ndarray, *, tag: int = 0) -> Any:
        nonlocal reads
        pending = submit(reader, split, res, ids, tag=tag)
        if len(ids) == 75:
            reads += 1
            bad = {1: first, 2: second}.get(reads)
            result = pending.result

            def with_damage() -> EncodedBatch:
                read = result()
                places = np.flatnonzero(ids == bad).tolist() if bad is not None else []
                errors = {place: DamagedSample(f"sample {bad}") for place in places}
                return EncodedBatch(read.images, read.nbytes, errors)

            monkeypatch.setattr(pending, "result", with_damage)
        return pending

    monkeypatch.setattr(Reader, "submit", injected)
    replaced = []
    with Loader(plan, on_bad_sample="skip") as loader:
        for batch in loader:
            replaced.append({i for i in (first, second) if i not in batch.spec.ids})
            expected = np.stack([reference.view(shard_set, batch.spec, i) for i in range(len(batch.spec))])
            pixels = (batch.images.permute(0, 2, 3, 1).numpy().astype(np.float64) * STD + MEAN) * 255
            error = np.abs(pixels - expected).mean(axis=(1, 2, 3))
            assert error.max() < 2, np.flatnonzero(error >= 2)
            labels = shard_set.splits["train"].samples[batch.spec.ids]["label"]
            np.testing.assert_array_equal(batch.labels, labels)
    assert {first} <= replaced[0]
    assert {second} <= replaced[1]


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
    assert sum(batch.spec.ids.tolist().count(13) for batch in rest[-9:]) == 3 * 4


def test_a_split_without_an_intact_sample_is_an_error(root: Path) -> None:
    plan = Plan(ShardSet.open(root), [Stage(res=32, epochs=2, batch_size=16)], eval_batch_size=None)
    with Loader(plan, on_bad_sample="skip") as loader:
        next(loader)
        for tar in (root / "32").glob("train-*.tar"):
            tar.write_bytes(b"")
        with pytest.raises(ResoluteError, match=r"is damaged, got 0 bytes.*nor can the 74 samples after it be read"):
            list(loader)


def test_a_stage_whose_photos_are_all_damaged_is_an_error_when_it_begins(root: Path) -> None:
    """The graph is prepared for its batches, the largest of the run, without reading them."""
    for tar in (root / "64").glob("train-*.tar"):
        tar.write_bytes(bytes(tar.stat().st_size))
    stages = [Stage(res=res, epochs=1, batch_size=16) for res in (32, 64)]
    plan = Plan(ShardSet.open(root), stages, eval_batch_size=None)
    with Loader(plan) as loader:
        for _ in range(plan.phases[1].first):
            next(loader)
        with pytest.raises(DamagedSample):
            next(loader)
