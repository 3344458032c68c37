"""DALI's memory is read by kernels of torch's stream before DALI may use it again: a model of a device shows it.

`Model` stands in for the device: a stream is a queue of kernels and events that the device runs when it likes, and an
image of DALI whose last reference is gone is memory that DALI writes to at once. Tensors are fake ones on "cuda:0", so
each operation also checks the devices of its operands.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from resolute.pipeline.graph import gpu_augment
from resolute.pipeline.graph.gpu_augment import GpuAugment
from resolute.pipeline.plan.augment_params import AugmentOps, erase_noise, used_ops
from resolute.pipeline.plan.rows import empty_rows, words_of
from resolute.pipeline.plan.stage import Augment
from tests.support.fake_cuda import FakeCuda
from tests.support.gpu_on_cpu import MEAN, STD

GPU = torch.device("cuda", 0)
LIMIT = 3
POLICY = used_ops([Augment(policy="randaugment", random_erasing_prob=0.5, mixup_alpha=0.2, cutmix_alpha=1.0)])


class Model(FakeCuda):
    """A GPU with one stream, and the faults that were seen."""

    def __init__(self, pace: Callable[[int], int]) -> None:
        """`pace`: how many of its queued operations the device runs whenever the host queues or asks for something."""
        super().__init__()
        self.queue: deque[tuple[str, Any]] = deque()
        self.pace, self.faults, self.written, self.waits = pace, list[str](), set[int](), 0
        model = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert not enable_timing
                self.passed, self.recorded = False, False

            def record(self, stream: Any) -> None:
                self.recorded = True
                model.enqueue("event", self)

            def query(self) -> bool:
                assert self.recorded
                model.run(model.pace(len(model.queue)))
                return self.passed

            def synchronize(self) -> None:
                assert self.recorded
                model.waits += not self.passed
                while not self.passed:
                    model.run(1)

        self.Event = Event

    def enqueue(self, kind: str, what: Any) -> None:
        self.queue.append((kind, what))
        self.run(self.pace(len(self.queue)))

    def run(self, operations: int) -> None:
        for _ in range(min(operations, len(self.queue))):
            kind, what = self.queue.popleft()
            if kind == "event":
                what.passed = True
            elif what in self.written:
                self.faults.append(f"image {what} was read after DALI had reused its memory")

    def image(self, number: int, spec_res: int, n: int) -> Any:
        """An image batch of DALI; DALI writes to its memory as soon as nobody refers to it."""
        owner = DaliImages(number, (n, spec_res, spec_res, 3))
        weakref.finalize(owner, self.written.add, number)
        return owner


class DaliImages:
    """A tensor of DALI as far as `GpuAugment` uses it."""

    def __init__(self, number: int, shape: tuple[int, ...]) -> None:
        self.number, self.shape = number, shape


class Kernel:
    """Stands in for a kernel: checks the operands' devices and dtypes, and queues a read of DALI's image."""

    def __init__(self, model: Model, numbers: dict[int, int]) -> None:
        self.model, self.numbers = model, numbers

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(programs > 0 for programs in grid)

        def launch(source: Any, target: Any, packed: Any, *others: Any, **options: Any) -> None:
            for tensor in (source, target, packed, *others):
                assert not isinstance(tensor, torch.Tensor) or tensor.device == GPU, "a tensor is not on the GPU"
            assert (source.dtype, packed.dtype) == (torch.uint8, torch.int32)
            assert source.shape == target.shape
            assert source.is_contiguous()
            assert target.is_contiguous()
            if id(source) in self.numbers:
                self.model.enqueue("read", self.numbers[id(source)])

        return launch


@contextmanager
def modelled(monkeypatch: pytest.MonkeyPatch, pace: Callable[[int], int]) -> Iterator[Model]:
    model, numbers, views = Model(pace), dict[int, int](), list[torch.Tensor]()
    with monkeypatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):

        def as_torch(images: DaliImages) -> torch.Tensor:
            view = torch.empty(images.shape, dtype=torch.uint8, device=GPU)
            numbers[id(view)] = images.number
            views.append(view)
            return view

        model.install(patch)
        patch.setattr(gpu_augment, "_check_build_tools", lambda: None)
        patch.setattr(gpu_augment, "_as_torch", as_torch)
        patch.setattr(gpu_augment, "apply_slot", Kernel(model, numbers))
        patch.setattr(gpu_augment, "finish", Kernel(model, numbers))
        yield model


def run(
    monkeypatch: pytest.MonkeyPatch,
    pace: Callable[[int], int],
    used: AugmentOps,
    *,
    batches: int = 40,
    close: bool = True,
) -> Model:
    """Finish batches of changing shapes as the graph does, and close; returns what the model saw."""
    with modelled(monkeypatch, pace) as model:
        kernels = GpuAugment(
            used, mean=MEAN, std=STD, noise=erase_noise(MEAN, STD), dtype=torch.float16, device=GPU, limit=LIMIT
        )
        busy = list(range(len(used.slots)))
        for number in range(batches):
            n, res = 4 + number % 3, 16 + 8 * (number % 2)
            packed = torch.from_numpy(words_of(empty_rows(n, len(used.slots))))  # on the host
            images = model.image(number, res, n)
            out = kernels(images, packed, busy if number % 2 else [])
            assert isinstance(out, FakeTensor)
            assert (out.device, out.dtype, tuple(out.shape)) == (GPU, torch.float16, (n, res, res, 3))
            del images
            assert len(kernels._held) <= LIMIT
        if close:
            kernels.close()
            assert len(kernels._held) == 0
        del kernels
        model.run(len(model.queue))
    return model


def never(queued: int) -> int:
    return 0


def at_once(queued: int) -> int:
    return queued


def at_random(queued: int, rng: np.random.Generator = np.random.default_rng(0)) -> int:  # noqa: B008
    return int(rng.integers(0, 4)) if rng.random() < 0.5 else 0


@pytest.mark.parametrize("used", [AugmentOps(), POLICY], ids=["plain", "policy"])
@pytest.mark.parametrize("pace", [never, at_once, at_random])
def test_every_image_is_read_before_dali_uses_its_memory_again(
    monkeypatch: pytest.MonkeyPatch, pace: Callable[[int], int], used: AugmentOps
) -> None:
    """Planted mistakes that it finds: nothing is held; the event is recorded before the kernels; the host does not wait
    for it; a tensor that stays on the host."""
    model = run(monkeypatch, pace, used)
    assert model.faults == []
    assert len(model.written) == 40  # and none is kept for ever
    if pace is at_once:
        assert model.waits == 0


def test_the_host_runs_ahead_of_the_device_by_no_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits once per batch beyond that, for the oldest. Planted mistake that it finds: a limit of one more."""
    assert run(monkeypatch, never, POLICY, batches=LIMIT).waits == LIMIT  # those of `close`
    assert run(monkeypatch, never, POLICY, batches=LIMIT + 4, close=False).waits == 4
