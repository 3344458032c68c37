"""Damaged samples with `on_bad_sample="skip"`: replaced in the same way in every run, counted and logged."""

from __future__ import annotations

import itertools
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader, candidates
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
        with pytest.raises(ResoluteError, match=r"is damaged, .*nor can any of 74 other samples"):
            list(loader)


def cut_short(root: Path, keep: float = 0.2) -> int:
    """Cut a tar of the training split to a fraction; returns its bytes that are left."""
    tar = root / "32/train-000001.tar"
    end = int(keep * tar.stat().st_size)
    os.truncate(tar, end)
    return end


def damage_in_place(shards: ShardSet, sample: int) -> None:
    """why: a loader is reading the tar, which `damage_sample` would empty for a moment."""
    record = shards.splits["train"].stored[32][sample]
    with shards.path(32, shards.splits["train"].shards[record["shard"]]).open("r+b") as tar:
        tar.seek(int(record["offset"]) + int(record["nbytes"]) // 2)
        tar.write(b"damaged")


@pytest.mark.parametrize("keep", [0.0, 0.4])
def test_a_tar_that_is_cut_short_is_reported_once_and_its_samples_come_from_other_tars(
    root: Path, caplog: pytest.LogCaptureFixture, keep: float
) -> None:
    shards = ShardSet.open(root)
    stored = shards.splits["train"].stored[32]
    end = cut_short(root, keep)
    ends = stored["offset"].astype(np.int64) + stored["nbytes"]
    missing = np.flatnonzero((stored["shard"] == 1) & (ends > end)).tolist()
    plan = Plan(shards, [Stage(res=32, epochs=2, batch_size=16)], eval_batch_size=None)
    with Loader(plan, on_bad_sample="skip") as loader:
        shown = [i for batch in loader for i in batch.spec.ids.tolist()]
        assert sorted(loader.skipped) == [("train", 32, i) for i in missing]
        assert len(missing) > 15
    assert not {*shown} & {*missing}
    assert max(map(shown.count, shown)) <= 8  # no sample stands for all of them
    (line,) = [message for message in caplog.messages if "train-000001.tar" in message]
    assert line.endswith("; the tar is cut short, so its other missing samples are skipped without a report")


def test_a_tar_of_other_bytes_is_reported_by_its_first_samples(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    shards = ShardSet.open(root)
    tar = root / "32/train-000001.tar"
    tar.write_bytes(bytes(tar.stat().st_size))
    plan = Plan(shards, [Stage(res=32, epochs=1, batch_size=16)], eval_batch_size=None)
    with Loader(plan, on_bad_sample="skip") as loader:
        list(loader)
        assert len(loader.skipped) > 15
    lines = [message for message in caplog.messages if "train-000001.tar" in message]
    assert len(lines) == 10
    assert lines[-1].endswith("; further damaged samples of this tar are skipped without a report")


@pytest.mark.parametrize(("shards", "each"), [(1, 900), (3, 700), (40, 4096)])
def test_the_samples_of_a_lost_tar_find_replacements_of_their_own_at_once(shards: int, each: int) -> None:
    """A set of one tar loses its last quarter, others a whole tar."""
    total, lost = shards * each, range((shards - 1) * each if shards > 1 else each * 3 // 4, shards * each)
    found = []
    for sample in lost[:: max(1, len(lost) // 50)]:
        tried = list(itertools.islice(candidates(sample, total), 12))
        found.append(next(candidate for candidate in tried if candidate not in lost))
        assert sample not in tried
    assert len({*found}) >= len(found) - 3  # near the end, the next sample of the split serves a few
    assert len({i // each for i in found}) <= 3


@pytest.mark.parametrize("total", [1, 2, 3, 7, 75, 100])
def test_every_other_sample_is_a_candidate_once(total: int) -> None:
    for sample in {0, total // 2, total - 1}:
        assert sorted([sample, *candidates(sample, total)]) == list(range(total))


def test_replacements_do_not_depend_on_ranks_threads_or_when_the_damage_was_met(root: Path) -> None:
    """One run meets it from the start, one in its third epoch, one on three ranks, one from a later batch on."""
    shards = ShardSet.open(root)
    plan = Plan(shards, [Stage(res=32, epochs=5, batch_size=15, augment=MIXED)], seed=3, eval_batch_size=None)
    last = plan.phases[4].first
    damage_sample(shards, 2)
    with Loader(plan, on_bad_sample="skip", num_threads=1) as loader:
        for _ in range(plan.phases[2].first):
            next(loader)
        for sample in (3, 4):  # 3 stands for 2 until then
            damage_in_place(shards, sample)
        cut_short(root)
        late = list(loader)[-plan.phases[4].batches :]
    with Loader(plan, on_bad_sample="skip", num_threads=2) as loader:
        early = list(loader)[last:]
    with ExitStack() as stack:
        options = {"on_bad_sample": "skip", "start": last, "num_threads": 1}
        ranks = [stack.enter_context(Loader(plan, rank=r, world_size=3, **options)) for r in range(3)]  # type: ignore[arg-type]
        for one, other in zip(early, late, strict=True):
            np.testing.assert_array_equal(one.spec.ids, other.spec.ids)
            assert torch.equal(one.images, other.images)
            assert torch.equal(one.images, torch.cat([next(rank).images for rank in ranks]))
