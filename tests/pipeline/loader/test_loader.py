"""The loader: exact pixels, the batches of the plan in order, clean errors and options."""

from __future__ import annotations

import dataclasses
import gc
import shutil
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from resolute.errors import DamagedSample, ResoluteError, StorageError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.batch import Batch
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.augment_params import CUTMIX, MIXUP
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Augment, Stage
from tests.support import reference
from tests.support.damage import damage_sample
from tests.support.fake_cuda import FakeCuda

MIXED = Augment(scale=(0.3, 1.0), mixup_alpha=0.8, cutmix_alpha=1.0, mixup_prob=0.8)
STAGES = (
    Stage(res=32, epochs=1, batch_size=16, augment=MIXED),
    Stage(res=64, epochs=1, batch_size=10, fraction=0.5),
    Stage(res=48, epochs=1, batch_size=32, augment=MIXED),
)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def plan(shard_set: ShardSet) -> Plan:
    return Plan(shard_set, STAGES, seed=1, eval_batch_size=7)


@pytest.fixture(scope="module")
def batches(plan: Plan) -> list[Batch]:
    with Loader(plan) as loader:
        return list(loader)


def pixels(batch: Batch) -> np.ndarray:
    """Images as the graph had them before normalising: (N, res, res, 3), 0..255, not rounded."""
    nhwc = batch.images.permute(0, 2, 3, 1).numpy().astype(np.float64)
    return (nhwc * STD + MEAN) * 255


def test_a_run_delivers_all_batches_of_the_plan_in_order(plan: Plan, batches: list[Batch]) -> None:
    assert [batch.spec.index for batch in batches] == list(range(plan.total_batches))
    for batch in batches:
        spec = plan.batch(batch.spec.index)
        assert tuple(batch.images.shape) == (len(spec), 3, spec.res, spec.res)
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert batch.images.dtype == torch.float32
        samples = plan.shards.splits[spec.split].samples
        labels = samples["label"]
        assert batch.keys.dtype == np.int64
        np.testing.assert_array_equal(batch.keys, samples["key"][spec.ids])
        np.testing.assert_array_equal(batch.labels, labels[spec.ids])
        np.testing.assert_array_equal(batch.partner_labels, labels[spec.ids[spec.partners]])
        np.testing.assert_array_equal(batch.lam, spec.lam)
        if spec.split == "val":
            stored = plan.shards.splits["val"].stored[spec.res][spec.ids]
            full = np.minimum(stored["width"], stored["height"]) == plan.shards.short_side(spec.res)
            assert (spec.crops[full, 2:] == spec.res).all()  # the centre crop
            assert not spec.flips.any()
            assert (batch.lam == 1).all()


@pytest.mark.parametrize("crop_pct", [None, 0.7])
def test_pixels_equal_pillow_within_rounding_at_stored_and_other_resolutions(
    shard_set: ShardSet, crop_pct: float | None
) -> None:
    """Decode, crop, antialiased bilinear resize, flips and normalise against PIL on the same bytes.

    The JPEG decoders differ by rounding (crop-region decode upsamples chroma from the region alone, so up to a few
    levels at its border): mean within 0.6 levels, 99 % within 3.
    """
    augment = Augment(scale=(0.3, 1.0), vflip_prob=0.5)
    stages = [
        Stage(res=48, epochs=1, batch_size=32, eval_res=40, augment=augment),
        Stage(
            res=(24, 40, 56),
            epochs=1,
            batch_size="constant_pixels",
            base_batch_size=5,
            res_schedule="random",
            eval_res=64,
            augment=augment,
        ),
    ]
    shapes = set()
    with Loader(Plan(shard_set, stages, eval_batch_size=15, eval_crop_pct=crop_pct)) as loader:
        for batch in loader:
            spec = batch.spec
            assert tuple(batch.images.shape) == (len(spec), 3, spec.res, spec.res)
            expected = np.stack([reference.view(shard_set, spec, i) for i in range(len(spec))])
            error = np.abs(pixels(batch) - expected)
            assert error.mean() < 0.6, spec
            assert np.quantile(error, 0.99) < 3.0, spec
            shapes.add((spec.split, spec.res, spec.stored_res))
            if spec.split == "val":
                stored = shard_set.splits["val"].stored[spec.stored_res][spec.ids]
                short = np.minimum(stored["width"], stored["height"])
                np.testing.assert_allclose(spec.crops[:, 2] / short, crop_pct or 0.875, atol=0.6 / short.min())
    assert shapes == {
        ("train", 48, 48),
        ("train", 24, 32),
        ("train", 40, 48),
        ("train", 56, 64),
        ("val", 40, 48),
        ("val", 64, 64),
    }


def test_mixed_batches_equal_the_numpy_oracle_within_rounding(shard_set: ShardSet, batches: list[Batch]) -> None:
    plain = [
        dataclasses.replace(stage, augment=dataclasses.replace(stage.augments[stage.max_res], mixup_prob=0.0))
        for stage in STAGES
    ]
    seen = set()
    with Loader(Plan(shard_set, plain, seed=1, eval_batch_size=7)) as loader:
        for unmixed, mixed in zip(loader, batches, strict=True):
            np.testing.assert_array_equal(unmixed.spec.crops, mixed.spec.crops)
            before = pixels(unmixed)
            np.testing.assert_allclose(before, np.rint(before), atol=1e-3)
            expected = reference.mix(np.rint(before).astype(np.uint8), mixed.spec)
            error = np.abs(pixels(mixed) - expected)
            assert error.max() < 1.001  # one level, where the blend falls on a half
            assert (error > 0.01).mean() < 0.01
            seen |= set(np.unique(mixed.spec.modes))
    assert {MIXUP, CUTMIX} <= seen


def test_batches_do_not_depend_on_threads_and_prefetching(plan: Plan, batches: list[Batch]) -> None:
    for threads, prefetched in ((1, 1), (3, 5)):
        with Loader(plan, num_threads=threads, batches_ahead=prefetched) as loader:
            for got, expected in zip(loader, batches, strict=True):
                assert torch.equal(got.images, expected.images)


def test_batches_stay_valid_after_later_batches_and_after_close(plan: Plan, batches: list[Batch]) -> None:
    with Loader(plan) as loader:
        kept = [next(loader) for _ in range(12)]
    for use in (next, list, Loader.epochs, lambda loader: loader.load_state_dict({"next_batch": 0})):
        with pytest.raises(ResoluteError, match=r"Loader: used after close\(\), expected an open loader; open another"):
            use(loader)
    del loader
    gc.collect()
    for got, expected in zip(kept, batches, strict=False):
        assert torch.equal(got.images, expected.images)


def test_a_damaged_sample_is_reported_when_its_batch_is_due(shard_root: Path, tmp_path: Path) -> None:
    """All batches before it are delivered, and the state never runs ahead of the delivered batches."""
    shards = ShardSet.open(shutil.copytree(shard_root, tmp_path / "copy"))
    plan = Plan(shards, [Stage(res=32, epochs=2, batch_size=5)], eval_batch_size=None)
    bad = 10
    name, offset = damage_sample(shards, int(plan.batch(bad).ids[2]))
    sound = Plan(ShardSet.open(shard_root), plan.stages, eval_batch_size=None)
    with Loader(sound) as loader:
        expected = [batch.images for batch in loader]
    with Loader(plan, batches_ahead=6) as loader:
        for index in range(bad):
            assert loader.state_dict()["next_batch"] == index
            assert torch.equal(next(loader).images, expected[index])
        where = rf"{name}: sample \d+ at offset {offset} is damaged, got CRC-32 [0-9a-f]+, expected"
        for _ in range(2):  # it is raised again until the loader is moved past it
            with pytest.raises(DamagedSample, match=where):
                next(loader)
            assert loader.state_dict()["next_batch"] == bad
        loader.load_state_dict({"next_batch": bad + 1})
        assert torch.equal(next(loader).images, expected[bad + 1])
    with Loader(plan, check_crc=False, start=bad) as loader:
        assert len(next(loader).spec) == 5


def test_unavailable_storage_is_not_damage_and_the_run_continues_with_the_same_batches(
    shard_root: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(shard_root, tmp_path / "copy"))
    plan = Plan(ShardSet.open(root), [Stage(res=32, epochs=3, batch_size=5)], eval_batch_size=None)
    with Loader(plan) as loader:
        expected = [batch.images for batch in loader]
    plan = Plan(ShardSet.open(root), plan.stages, eval_batch_size=None)
    with Loader(plan, on_bad_sample="skip") as loader:
        for i in range(3):
            assert torch.equal(next(loader).images, expected[i])
        (root / "32").rename(root / "away")
        plan.shards.files.release()  # as if many other files had been opened since
        with pytest.raises(StorageError, match=r"\.tar: not found, expected a file of the set"):  # noqa: PT012
            for batch in loader:  # batches read before are delivered
                assert torch.equal(batch.images, expected[batch.spec.index])
        state = loader.state_dict()
        assert 3 <= state["next_batch"] < plan.total_batches
        assert not loader.skipped
        (root / "away").rename(root / "32")
        assert torch.equal(next(loader).images, expected[state["next_batch"]])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 2, "world_size": 2}, "Loader.rank: got 2, expected 0 to 1; correct it"),
        ({"rank": 0, "world_size": 16}, "cannot feed 16 ranks"),
        ({"start": 10**6}, "Loader.start: got 1000000, expected 0 to "),
        ({"mean": [0.5, 0.5]}, r"Loader.mean: got \[0.5, 0.5\], expected 3 numbers"),
        (
            {"dtype": torch.float64},
            "dtype: got torch.float64, expected torch.float32, torch.float16, torch.bfloat16 or",
        ),
        ({"decode": "gpu"}, "decode: got gpu with device cpu"),
        ({"device": "gpu"}, "device: got gpu, expected cpu, cuda or cuda:N; choose one"),
        ({"device": "mps"}, "device: got mps, expected cpu, cuda or cuda:N; choose one"),
        ({"device": "cuda:x"}, "device: got cuda:x, expected cpu, cuda or cuda:N; choose one"),
        ({"device": "cuda:-1"}, "device: got cuda:-1, expected cpu, cuda or cuda:N; choose one"),
        ({"device": "cpu:3"}, "device: got cpu:3, expected cpu, cuda or cuda:N; choose one"),
        ({"device": ""}, "device: got no name, expected cpu, cuda or cuda:N; choose one"),
        ({"device": None}, "device: got None, expected cpu, cuda or cuda:N; choose one"),
        ({"plan": "shards"}, "Loader.plan: got str, expected a Plan; build one of the shard set"),
        ({"hw_decoder_load": 0.9}, "hw_decoder_load: without effect with decode cpu"),
    ],
)
def test_options_out_of_range_are_refused_in_one_line(plan: Plan, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ResoluteError, match=words) as error:
        Loader(**{"plan": plan, **options})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("mode", "smoothing"), [("batch", 0.1), ("elem", 0.0)])
def test_the_loss_of_soft_targets_is_the_weighted_sum_of_the_losses_of_both_labels(
    shard_set: ShardSet, mode: Literal["batch", "elem"], smoothing: float
) -> None:
    """With the smoothing of torch's `cross_entropy`."""
    augment = Augment(mixup_alpha=1.0, cutmix_alpha=1.0, mixup_prob=0.7, mixup_mode=mode)
    plan = Plan(shard_set, [Stage(res=32, epochs=2, batch_size=12, augment=augment)], eval_batch_size=8)
    weights, classes = set(), 4  # one more than the set has
    with Loader(plan) as loader:
        for batch in loader:
            logits = torch.randn(len(batch.labels), classes, generator=torch.Generator().manual_seed(0))
            own, partner = (
                cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
                for labels in (batch.labels, batch.partner_labels)
            )
            targets = batch.soft_targets(classes, smoothing=smoothing)
            assert (targets.shape, targets.dtype) == (logits.shape, torch.float32)
            expected = (batch.lam * own + (1 - batch.lam) * partner).mean()
            torch.testing.assert_close(cross_entropy(logits, targets), expected)
            weights |= set(batch.lam.tolist())
    assert len(weights) > 5
    for wrong in (-0.1, 1.1):
        with pytest.raises(ResoluteError, match=r"smoothing: got .*, expected 0 to 1"):
            batch.soft_targets(classes, smoothing=wrong)


def test_the_graph_has_the_device_of_the_batches_and_decoders_on_request(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda(devices=2, current=1).install(monkeypatch)
    monkeypatch.setattr("resolute.pipeline.loader.loader.BatchPipeline", graph := Mock(side_effect=InterruptedError))

    def requested(**options: Any) -> dict[str, Any]:
        with pytest.raises(InterruptedError):
            Loader(plan, **options)
        return dict(graph.call_args.kwargs)

    for device, index in (("cuda", 1), ("cuda:0", 0)):
        made = requested(device=device)
        assert (made["device_id"], made["decode"]) == (index, "cpu")  # GPU decoders may crash: only on request
        made = requested(device=device, decode="gpu")
        assert (made["device_id"], made["decode"], made["hw_decoder_load"]) == (index, "gpu", 1.0)
    for device in ("cuda:2", "cuda:256", "cuda:300"):  # torch.device takes 256 for 0
        with pytest.raises(ResoluteError, match=f"device {device}: got 2 CUDA devices, expected more"):
            Loader(plan, device=device)


def test_a_gpu_that_torch_cannot_use_is_an_error_of_one_line(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda().install(monkeypatch)
    reason = "Cannot re-initialize CUDA in forked subprocess"
    monkeypatch.setattr(fake, "current_device", Mock(side_effect=RuntimeError(f"{reason}\nmore")))
    with pytest.raises(ResoluteError, match=f"device cuda: cannot be used, got '{reason}', expected") as error:
        Loader(plan, device="cuda")
    assert "\n" not in str(error.value)


def test_the_state_of_another_plan_is_refused_with_the_differences(shard_root: Path, shard_set: ShardSet) -> None:
    def planned(shards: ShardSet = shard_set, *, batch_size: int = 16, **options: Any) -> Plan:
        return Plan(shards, [Stage(res=32, epochs=1, batch_size=batch_size)], **{"eval_batch_size": 7} | options)

    def state(plan: Plan) -> dict[str, Any]:
        with Loader(plan) as loader:
            next(loader)
            return loader.state_dict()

    def changed(what: str) -> ShardSet:
        return dataclasses.replace(shard_set, digests={**shard_set.digests, what: "other"})

    others = {
        r"seed got 1, expected 0": planned(seed=1),
        r"stages\[0\]\.batch_size got 8, expected 16": planned(batch_size=8),
        r"shards\.train images at 32 px got 'other', expected '\w{12}'": planned(changed("train images at 32 px")),
    }
    with Loader(planned()) as loader:
        for words, other in others.items():
            with pytest.raises(ResoluteError, match=f"the state of another plan: {words}.*; build the plan that"):
                loader.load_state_dict(state(other))
        for same in (ShardSet.open(shard_root, resolutions=(32,)), changed("train images at 48 px")):
            loader.load_state_dict(state(planned(same)))
            assert next(loader).spec.index == 1
