"""The Triton kernels in Triton's interpreter on a CPU; run by `test_triton_kernels` in a process of its own.

The oracles are the CPU's compiled functions, which equal Pillow (`test_augment_kernels`), and the slow reference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.graph import gpu_finish as launch
from resolute.pipeline.graph.gpu_finish import GpuFinish
from resolute.pipeline.graph.kernels import augment as pixels
from resolute.pipeline.graph.kernels import triton_finish, triton_slot
from resolute.pipeline.plan import autoaugment as p
from resolute.pipeline.plan.augment_params import (
    CUTMIX,
    MIXUP,
    NOISE_PX,
    UNMIXED,
    AugmentOps,
    augment_params,
    erase_noise,
    used_ops,
)
from resolute.pipeline.plan.plan import BatchSpec, Plan
from resolute.pipeline.plan.stage import Augment, Stage
from tests.pipeline.graph.test_augment_kernels import CASES, EVERY, MEAN, STD, run
from tests.support import reference_ops
from tests.support.batch_spec import batch_spec as spec
from tests.support.gpu_on_cpu import GpuLoader

# the interpreter of Triton 3.6, which torch 2.10 brings
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
CPU = torch.device("cpu")
EXACT = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}  # levels stay levels


Cases = dict[int, list[list[float]]]


def every_case(res: int) -> Cases:
    """All values of `CASES`, but no wide blurs, which take minutes; affine ones about the centre of the image."""
    table = p.operations("trivialaugment", res)[1]
    affine = [list(table[op, k, sign]) for op in range(1, 6) for k in (0, 3, 9, 22, 30) for sign in (0, 1)]
    return {**CASES, p.AFFINE: affine, p.BLUR: CASES[p.BLUR][:2]}


def few_cases(res: int) -> Cases:
    return {kind: values[:: 1 + len(values) // 6] for kind, values in every_case(res).items()}


def one_case(res: int) -> Cases:
    """One of each: factor 1.27, a rotation by 40 degrees."""
    cases = every_case(res)
    return {kind: values[4:5] or values[-1:] for kind, values in cases.items()} | {p.AFFINE: cases[p.AFFINE][45:46]}


def photos(res: int, count: int = 4) -> NDArray[np.uint8]:
    """Noise, faint noise, an even image, hard edges."""
    images = np.random.default_rng(res).integers(0, 256, (count, res, res, 3), dtype=np.uint8)
    if count > 3:
        images[1] //= 16
        images[2] = (7, 130, 255)
        images[3] = np.where(images[3] > 128, 255, 0)
    return images


def augmented(
    images: NDArray[np.uint8], spec_: BatchSpec, used: AugmentOps, *, dtype: torch.dtype = torch.float32,
    mean: Any = EXACT["mean"], std: Any = EXACT["std"],
) -> torch.Tensor:  # fmt: skip
    kernels = GpuFinish(used, mean=mean, std=std, noise=erase_noise(MEAN, STD), dtype=dtype, device=CPU)
    kernels._fill = torch.tensor([round(255 * m) for m in MEAN], dtype=torch.int32)
    return kernels(torch.from_numpy(images), *kernels.pack(spec_))


def levels(images: torch.Tensor) -> NDArray[np.int64]:
    rounded = images.numpy().round()
    np.testing.assert_allclose(images.numpy(), rounded, atol=1e-3)
    return rounded.astype(np.int64)


def under_every_operation(res: int, cases: Cases) -> tuple[Any, Any, Any, NDArray[np.int64]]:
    """Photos, kinds and values of every operation on every photo, and the kernels' results."""
    listed = [(kind, v) for kind, all_ in cases.items() for v in all_]
    images = photos(res, 4 if res < 64 else 1)
    kinds = np.repeat(np.array([kind for kind, _ in listed], np.int32), len(images))[:, None]
    values = np.repeat(np.array([v for _, v in listed], np.float32), len(images), axis=0)[:, None]
    images = np.tile(images, (len(listed), 1, 1, 1))
    batch_spec = spec(len(images), res=res, augment_params={"policy_kinds": kinds, "policy_values": values})
    return images, kinds, values, levels(augmented(images, batch_spec, AugmentOps(slots=(("policy", EVERY),))))


@pytest.mark.parametrize("res", [1, 2, 3, 7, 33, 67])
def test_every_operation_equals_that_of_the_cpu(res: int) -> None:
    """All values at 7 px; at 67 px a program writes two blocks, and the last program of an image only a part of one."""
    cases = {7: every_case, 33: few_cases}.get(res, one_case)
    images, kinds, values, got = under_every_operation(res, cases(res))
    for image, kind, value, ours in zip(images, kinds, values, got, strict=True):
        expected = image.copy()
        pixels.apply_ops(expected, kind, value)
        # why one level for blur: its weights are computed in float32 here, in float64 there
        assert np.abs(expected - ours).max() <= (kind[0] == p.BLUR), (kind, value)


@triton.jit
def _rounded(value):
    return tl.minimum(tl.maximum(value + 0.5, 0.0), 255.0).to(tl.int32)


@triton.jit
def _other_grey(red, green, blue):
    return (red * 19595 + green * 38470 + blue * 7471) >> 16


@triton.jit
def _cut_bilinear(a, b, c, d, du, dv):
    return ((a * (2048 - du) + b * du) * (2048 - dv) + (c * (2048 - du) + d * du) * dv) >> 22


@triton.jit
def _repeated(index, size):
    return tl.minimum(tl.maximum(index, 0), size - 1)


@triton.jit
def _wide(distance, sigma):
    return tl.exp(-0.5 * (distance / sigma) * (distance / sigma) * 0.9)


@triton.jit
def _unturned(hue, top, chroma, n):
    k = hue + n
    return (top + 0.5 - chroma * tl.maximum(tl.minimum(tl.minimum(4.0 - k, k), 1.0), 0.0)).to(tl.int32)


MISTAKES = {
    "_clipped": (_rounded, {p.BRIGHTNESS, p.SATURATION, p.CONTRAST, p.SHARPNESS}),
    "_grey": (_other_grey, {p.SATURATION}), "_bilinear": (_cut_bilinear, {p.AFFINE}),
    "_mirrored": (_repeated, {p.BLUR}), "_weight": (_wide, {p.BLUR}), "_turned": (_unturned, {p.HUE}),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_kernel_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In the operations that use the function, and in no others."""
    mistake, expected = MISTAKES[name]
    monkeypatch.setattr(triton_slot, name, mistake)
    wrong = set()
    for image, kind, value, got in zip(*under_every_operation(7, one_case(7)), strict=True):
        right = image.copy()
        pixels.apply_ops(right, kind, value)
        if np.abs(right - got).max() > (kind[0] == p.BLUR):
            wrong.add(int(kind[0]))
    assert wrong == expected


def test_a_blur_wider_than_the_image_equals_that_of_the_cpu() -> None:
    images, kinds, values, got = under_every_operation(4, {p.BLUR: [[1.1, 0, 0, 0, 0, 0]]})
    for image, kind, value, ours in zip(images, kinds, values, got, strict=True):
        expected = image.copy()
        pixels.apply_ops(expected, kind, value)
        assert np.abs(expected - ours).max() <= 1


def test_every_operation_is_within_one_level_of_the_slow_oracle() -> None:
    images, kinds, values, got = under_every_operation(21, few_cases(21))
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
def test_random_policies_equal_the_cpu_graph(augment: Augment, n: int) -> None:
    """Slots in alternating buffers, then erasing: whole batches against the CPU graph."""
    images, used = photos(19, n), used_ops([augment])
    batch_spec = spec(n, res=19, augment_params=augment_params(augment, seed=n, epoch=0, ids=np.arange(n), res=19))
    np.testing.assert_array_equal(levels(augmented(images, batch_spec, used)), run(images, batch_spec, used))


@pytest.mark.parametrize("fill", ["mean", "noise"])
@pytest.mark.parametrize("n", [2, 8])
def test_erasing_and_mixing_without_operations_equal_the_cpu_graph(fill: Any, n: int) -> None:
    res, augment = 17, Augment(random_erasing_prob=0.8, random_erasing_fill=fill, mixup_alpha=0.5, cutmix_alpha=1.0)
    drawn = augment_params(augment, seed=1, epoch=0, ids=np.arange(n), res=res)
    if fill == "noise":
        drawn["erase_from"][0], drawn["erase_boxes"][0] = (NOISE_PX - 2, NOISE_PX - 3), (1, 2, 9, 8)  # over its border
    modes = np.arange(n, dtype=np.int32) % 3
    boxes = np.zeros((n, 4), np.int32)
    boxes[modes == CUTMIX] = (3, 5, 8, 12)
    lam = np.where(modes == MIXUP, np.linspace(0.2, 0.8, n), 1).astype(np.float32)
    batch_spec = spec(n, res=res, augment_params=drawn, modes=modes, boxes=boxes, lam=lam)
    used = used_ops([augment])
    assert not used.slots
    images = photos(res, n)
    got = levels(augmented(images, batch_spec, used))
    np.testing.assert_array_equal(got, run(images, batch_spec, used))
    assert (got != images).any()


def under_extreme_boxes() -> tuple[Any, Any]:
    """Boxes that are empty, full or at a border; some samples are their own mix partner."""
    res = 6
    edges = np.array([(0, 0, 0, 0), (0, 0, 6, 6), (5, 5, 1, 1), (0, 5, 6, 1), (5, 0, 1, 6), (0, 0, 1, 1)], np.int32)
    n = len(edges)
    drawn = {"erase_boxes": edges, "erase_from": np.array([(-1, -1), (255, 255)] * (n // 2), np.int32)}
    modes = np.array([UNMIXED, MIXUP, MIXUP, CUTMIX, CUTMIX, CUTMIX], np.int32)
    batch_spec = spec(
        n, res=res, augment_params=drawn, modes=modes, boxes=np.where(modes[:, None] == CUTMIX, edges[::-1], 0),
        lam=np.array([1, 0, 1, 1, 1, 1], np.float32), partners=np.array([0, 1, 5, 3, 0, 2], np.int32),
    )  # fmt: skip
    used = AugmentOps(fills=frozenset({"mean", "noise"}), mixing=True)
    images = photos(res, n)
    return levels(augmented(images, batch_spec, used)), run(images, batch_spec, used)


def test_boxes_may_be_empty_or_cover_the_image_and_a_partner_may_be_the_image_itself() -> None:
    np.testing.assert_array_equal(*under_extreme_boxes())


@triton.jit
def _beyond(box, x, y):
    left, top = tl.load(box), tl.load(box + 1)
    return (x >= left) & (x <= left + tl.load(box + 2)) & (y >= top) & (y < top + tl.load(box + 3))


@triton.jit
def _cut_mixed(own, partner, lam):
    return (own.to(tl.float32) * lam + partner.to(tl.float32) * (1.0 - lam) + 0.5).to(tl.int32) - 1


@pytest.mark.parametrize(("name", "mistake"), [("_within", _beyond), ("_mixed", _cut_mixed)])
def test_a_mistake_in_erasing_or_mixing_is_found(monkeypatch: pytest.MonkeyPatch, name: str, mistake: Any) -> None:
    monkeypatch.setattr(triton_finish, name, mistake)
    got, right = under_extreme_boxes()
    assert (got != right).any()


def test_the_grey_levels_of_a_large_image_are_summed_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2903 px on, the sum of a white image exceeds 32 bits."""
    monkeypatch.setattr(launch, "BLOCK", 2**20)  # the largest that Triton has: few steps
    images = np.full((1, 2912, 2912, 3), 255, np.uint8)
    drawn = {"policy_kinds": np.array([[p.CONTRAST]], np.int32), "policy_values": np.zeros((1, 1, 6), np.float32)}
    batch_spec = spec(1, res=2912, augment_params=drawn)
    got = augmented(images, batch_spec, AugmentOps(slots=(("policy", EVERY),)))
    assert got.min() == got.max() == pytest.approx(255)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_dtype_is_the_rounded_float32(dtype: torch.dtype) -> None:
    n, augment = 5, Augment(policy="randaugment", num_ops=2, random_erasing_prob=0.5, mixup_alpha=0.5, cutmix_alpha=1.0)
    modes, lam = np.arange(n, dtype=np.int32) % 3, np.linspace(0, 1, n, dtype=np.float32)
    batch_spec = spec(
        n, res=11, augment_params=augment_params(augment, seed=n, epoch=0, ids=np.arange(n), res=11), modes=modes,
        lam=lam, partners=np.arange(n, dtype=np.int32)[::-1].copy(), boxes=np.tile(np.array([2, 3, 5, 4]), (n, 1)),
    )  # fmt: skip
    images, used = photos(11, n), used_ops([augment])
    exact, rounded = (augmented(images, batch_spec, used, dtype=kind, mean=MEAN, std=STD)
                      for kind in (torch.float32, dtype))  # fmt: skip
    assert rounded.dtype == dtype
    if dtype == torch.bfloat16:  # why: Triton's interpreter truncates, devices round to the nearest
        torch.testing.assert_close(rounded.float(), exact, rtol=2**-7, atol=0)
    else:
        assert torch.equal(rounded, exact.to(dtype))


def test_levels_that_are_not_normalised_are_those_of_the_mixed_images() -> None:
    """uint8 output, and `normalise` afterwards."""
    n = 8
    augment = Augment(random_erasing_prob=0.7, random_erasing_fill="noise", mixup_alpha=0.4, mixup_mode="elem")
    params = augment_params(augment, seed=3, epoch=0, ids=np.arange(n), res=11)
    modes = np.array([UNMIXED, MIXUP, CUTMIX, MIXUP] * 2, np.int32)
    batch_spec = spec(
        n, res=11, augment_params=params, modes=modes, lam=np.linspace(0.1, 1, n, dtype=np.float32),
        partners=np.arange(n, dtype=np.int32)[::-1].copy(), boxes=np.tile(np.array([2, 3, 5, 4]), (n, 1)),
    )  # fmt: skip
    images, used = photos(11, n), used_ops([augment])
    normalised = augmented(images, batch_spec, used, mean=MEAN, std=STD)
    kernels = GpuFinish(used, mean=MEAN, std=STD, noise=erase_noise(MEAN, STD), dtype=torch.float32, device=CPU,
                        as_bytes=True)  # fmt: skip
    kernels.warm_up()
    got = kernels(torch.from_numpy(images), *kernels.pack(batch_spec))
    assert got.dtype == torch.uint8
    np.testing.assert_array_equal(got.numpy(), levels(augmented(images, batch_spec, used)))
    assert torch.equal(kernels.normalise(got), normalised)


def test_in_the_loader_each_batch_gets_its_own_parameters(
    monkeypatch: pytest.MonkeyPatch, shard_set: ShardSet
) -> None:
    """Decoded and resized by DALI's operators; the kernels then do what the CPU's graph does to the same images."""
    resized = []

    class Recording(GpuFinish):
        def __call__(self, images: Any, *others: Any) -> torch.Tensor:
            resized.append(np.asarray(images).copy())
            return super().__call__(images, *others)

    augment = Augment(policy="randaugment", grey_prob=0.2, random_erasing_prob=0.5, mixup_alpha=0.5, cutmix_alpha=1.0,
                      mixup_mode="elem", vflip_prob=0.5)  # fmt: skip
    stages = [Stage(res=res, epochs=1, batch_size=size, fraction=0.06, augment=augment)
              for res, size in ((32, 1), (48, 2), (32, 3))]  # fmt: skip
    plan = Plan(shard_set, [*stages, Stage(res=32, epochs=1, batch_size=2, fraction=0.06)], eval_batch_size=None)
    monkeypatch.setattr(launch, "GpuFinish", Recording)
    with GpuLoader(monkeypatch, plan, prefetch_batches=3) as loader:
        resized.clear()  # of the warm-up
        for batch, images in zip(loader, resized, strict=False):  # why in this order: the loader fills the list
            got = batch.images.permute(0, 2, 3, 1) * torch.tensor(STD) + torch.tensor(MEAN)
            params = {name: each for name, each in batch.spec.augment_params.items() if name != "vflips"}
            unflipped = replace(batch.spec, flips=np.zeros_like(batch.spec.flips), augment_params=params)
            np.testing.assert_array_equal(levels(got * 255), run(images, unflipped, used_ops([augment])))
    assert len(resized) == plan.total_batches >= 8


def test_a_stage_without_augmentation_takes_one_launch_and_changes_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    images, used = photos(9), used_ops([Augment(policy="randaugment", random_erasing_prob=0.5, mixup_alpha=0.2)])
    launches = counted(monkeypatch)
    np.testing.assert_array_equal(levels(augmented(images, spec(4, res=9), used)), images)
    assert launches == ["finish"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_images_are_normalised_in_every_dtype(dtype: torch.dtype) -> None:
    images, used = photos(13), AugmentOps(fills=frozenset({"mean"}))
    got = augmented(images, spec(4, res=13), used, dtype=dtype, mean=MEAN, std=STD)
    expected = (torch.from_numpy(images).double() / 255 - torch.tensor(MEAN).double()) / torch.tensor(STD).double()
    assert got.dtype == dtype
    assert got.permute(0, 3, 1, 2).is_contiguous(memory_format=torch.channels_last)
    tolerance = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The list to which the names of all further kernel launches are appended."""
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
def test_a_batch_takes_one_launch_per_slot_plus_one(
    monkeypatch: pytest.MonkeyPatch, policy: Any
) -> None:
    augment = Augment(policy=policy, random_erasing_prob=0.5, mixup_alpha=0.2)
    used, launches = used_ops([augment]), counted(monkeypatch)
    for seed in range(2):
        launches.clear()
        batch_spec = spec(8, res=3, augment_params=augment_params(augment, seed=seed, epoch=0, ids=np.arange(8), res=3))
        augmented(photos(3, 8), batch_spec, used)
        assert launches == ["apply_slot"] * len(used.slots) + ["finish"]


def test_the_warm_up_launches_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    used, launches = used_ops([Augment(policy="randaugment", num_ops=2)]), counted(monkeypatch)
    kernels = GpuFinish(used, mean=MEAN, std=STD, noise=erase_noise(MEAN, STD), dtype=torch.float32, device=CPU)
    kernels.warm_up()
    assert launches == ["apply_slot", "apply_slot", "finish"]
