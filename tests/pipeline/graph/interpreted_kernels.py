"""Triton's kernels in its interpreter, on a CPU: run by `test_kernels` in a process of its own.

The CPU's compiled functions follow Pillow exactly (`test_ops`), so that they are the oracle here, beside the slow one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipeline.graph import augment_nodes as ops
from pipeline.graph import gpu_augment as launch
from pipeline.graph.gpu_augment import GpuAugment
from pipeline.graph.kernels import augment as pixels
from pipeline.plan import autoaugment as p
from pipeline.plan.plan import BatchSpec
from pipeline.plan.sampling import CUTMIX, MIXUP, NOISE_PX, Features, augment_params, features
from pipeline.plan.stage import Augment
from tests.pipeline.graph.test_augment_kernels import CASES, EVERY, MEAN, STD, run, spec
from tests.support import reference_ops

CPU = torch.device("cpu")
# why not all: interpreted, an image takes about a tenth of a second, and one under a wide blur a minute
FEW = {kind: all_[::3] for kind, all_ in CASES.items()} | {p.BLUR: CASES[p.BLUR][:2], p.AFFINE: CASES[p.AFFINE][::12]}
EXACT = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}  # levels stay levels


def photos(res: int, count: int = 4) -> NDArray[np.uint8]:
    """Noise, faint noise, an even image, hard edges."""
    images = np.random.default_rng(res).integers(0, 256, (count, res, res, 3), dtype=np.uint8)
    if count > 3:
        images[1] //= 16
        images[2] = (7, 130, 255)
        images[3] = np.where(images[3] > 128, 255, 0)
    return images


def augmented(
    images: NDArray[np.uint8], spec_: BatchSpec, wanted: Features, *, dtype: torch.dtype = torch.float32,
    mean: Any = EXACT["mean"], std: Any = EXACT["std"],
) -> torch.Tensor:  # fmt: skip
    kernels = GpuAugment(wanted, mean=mean, std=std, noise=ops.erase_noise(MEAN, STD), dtype=dtype, device=CPU)
    kernels._fill = torch.tensor([round(255 * m) for m in MEAN], dtype=torch.int32)
    return kernels(torch.from_numpy(images), *kernels.pack(spec_))


def levels(images: torch.Tensor) -> NDArray[np.int64]:
    rounded = images.numpy().round()
    np.testing.assert_allclose(images.numpy(), rounded, atol=1e-3)
    return rounded.astype(np.int64)


def under_every_operation(res: int, cases: dict[int, list[list[float]]]) -> tuple[Any, Any, Any, NDArray[np.int64]]:
    """Photos, kinds and values of every operation of every photo, and what the kernels make of them."""
    listed = [(kind, v) for kind, all_ in cases.items() for v in all_]
    images = photos(res)
    kinds = np.repeat(np.array([kind for kind, _ in listed], np.int32), len(images))[:, None]
    values = np.repeat(np.array([v for _, v in listed], np.float32), len(images), axis=0)[:, None]
    images = np.tile(images, (len(listed), 1, 1, 1))
    given = spec(len(images), res=res, augment_params={"policy_kinds": kinds, "policy_values": values})
    return images, kinds, values, levels(augmented(images, given, Features(slots=(("policy", EVERY),))))


@pytest.mark.parametrize("res", [1, 2, 33])
def test_every_operation_is_that_of_the_cpu(res: int) -> None:
    cases = FEW if res == 33 else {kind: all_[1:2] or all_ for kind, all_ in FEW.items()}
    images, kinds, values, got = under_every_operation(res, cases)
    for image, kind, value, ours in zip(images, kinds, values, got, strict=True):
        expected = image.copy()
        pixels.apply_ops(expected, kind, value)
        assert np.abs(expected - ours).max() == 0, (kind, value)


def test_a_blur_wider_than_the_image_is_that_of_the_cpu() -> None:
    images, kinds, values, got = under_every_operation(4, {p.BLUR: [[1.1, 0, 0, 0, 0, 0]]})
    for image, kind, value, ours in zip(images, kinds, values, got, strict=True):
        expected = image.copy()
        pixels.apply_ops(expected, kind, value)
        assert np.abs(expected - ours).max() <= 1


def test_every_operation_is_within_one_level_of_the_slow_oracle() -> None:
    images, kinds, values, got = under_every_operation(21, {kind: all_[1:2] or all_ for kind, all_ in FEW.items()})
    for image, kind, value, ours in zip(images, kinds, values, got, strict=True):
        expected = reference_ops.operation(image, int(kind[0]), value[0]).astype(int)
        assert np.abs(expected - ours).max() <= 1, (kind, value)


POLICIES = [
    Augment(policy="randaugment", num_ops=3), Augment(policy="trivialaugment"), Augment(policy="autoaugment"),
    Augment(policy="3-augment"),
    Augment(policy="randaugment", jitter=(0.4, 0.4, 0.4, 0.1), grey_prob=0.3,
            random_erasing_prob=0.5, random_erasing_fill="noise"),
]  # fmt: skip


@pytest.mark.parametrize(("augment", "n"), [(POLICIES[0], 1), *((augment, 6) for augment in POLICIES)])
def test_random_programs_are_those_of_the_cpus_graph(augment: Augment, n: int) -> None:
    """Slot after slot in alternating buffers, then erasing: whole batches against the CPU's graph."""
    images, wanted = photos(19, n), features([augment])
    given = spec(n, res=19, augment_params=augment_params(augment, seed=n, epoch=0, ids=np.arange(n), res=19))
    np.testing.assert_array_equal(levels(augmented(images, given, wanted)), run(images, given, wanted))


@pytest.mark.parametrize("fill", ["mean", "noise"])
@pytest.mark.parametrize("n", [2, 8])
def test_erasing_and_mixing_without_a_slot_are_those_of_the_cpus_graph(fill: Any, n: int) -> None:
    res, augment = 17, Augment(random_erasing_prob=0.8, random_erasing_fill=fill, mixup_alpha=0.5, cutmix_alpha=1.0)
    drawn = augment_params(augment, seed=1, epoch=0, ids=np.arange(n), res=res)
    if fill == "noise":
        drawn["erase_from"][0], drawn["erase_boxes"][0] = (NOISE_PX - 2, NOISE_PX - 3), (1, 2, 9, 8)  # over its border
    modes = np.arange(n, dtype=np.int32) % 3
    boxes = np.zeros((n, 4), np.int32)
    boxes[modes == CUTMIX] = (3, 5, 8, 12)
    lam = np.where(modes == MIXUP, np.linspace(0.2, 0.8, n), 1).astype(np.float32)
    given = spec(n, res=res, augment_params=drawn, modes=modes, boxes=boxes, lam=lam)
    wanted = features([augment])
    assert not wanted.slots
    images = photos(res, n)
    got = levels(augmented(images, given, wanted))
    np.testing.assert_array_equal(got, run(images, given, wanted))
    assert (got != images).any()


def test_a_stage_without_augmentation_passes_images_through_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    images, wanted = photos(9), features([Augment(policy="randaugment", random_erasing_prob=0.5, mixup_alpha=0.2)])
    launches = counted(monkeypatch)
    np.testing.assert_array_equal(levels(augmented(images, spec(4, res=9), wanted)), images)
    assert launches == ["finish"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_images_are_normalised_in_every_dtype(dtype: torch.dtype) -> None:
    images, wanted = photos(13), Features(fills=frozenset({"mean"}))
    got = augmented(images, spec(4, res=13), wanted, dtype=dtype, mean=MEAN, std=STD)
    expected = (torch.from_numpy(images).double() / 255 - torch.tensor(MEAN).double()) / torch.tensor(STD).double()
    assert got.dtype == dtype
    assert got.permute(0, 3, 1, 2).is_contiguous(memory_format=torch.channels_last)
    tolerance = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched from now on."""
    launches: list[str] = []

    class Counting:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: Any) -> Any:
            launches.append(self.name)
            return self.kernel[grid]

    for name in ("apply_slot", "finish"):
        monkeypatch.setattr(launch, name, Counting(name, getattr(launch, name)))
    return launches


@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment"])
def test_launches_are_the_slots_and_one_whatever_the_policy_draws(
    monkeypatch: pytest.MonkeyPatch, policy: Any
) -> None:
    augment = Augment(policy=policy, random_erasing_prob=0.5, mixup_alpha=0.2)
    wanted, launches = features([augment]), counted(monkeypatch)
    for seed in range(2):
        launches.clear()
        given = spec(8, res=3, augment_params=augment_params(augment, seed=seed, epoch=0, ids=np.arange(8), res=3))
        augmented(photos(3, 8), given, wanted)
        assert launches == ["apply_slot"] * len(wanted.slots) + ["finish"]


def test_the_warm_up_launches_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, launches = features([Augment(policy="randaugment", num_ops=2)]), counted(monkeypatch)
    kernels = GpuAugment(wanted, mean=MEAN, std=STD, noise=ops.erase_noise(MEAN, STD), dtype=torch.float32, device=CPU)
    kernels.warm_up()
    assert launches == ["apply_slot", "apply_slot", "finish"]
