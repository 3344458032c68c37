"""Warm-up: runs the shapes of a run once before the clock starts, to compile kernels and allocate memory.

Nothing here changes weights, statistics, gradients or random state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Literal

import torch
from torch import nn

from resolute import cuda
from resolute.errors import ResoluteError
from resolute.pipeline.jit import has_cache, is_cached
from resolute.pipeline.plan.plan import Phase, Plan
from resolute.train.devices.hardware import peak_memory_bytes
from resolute.train.devices.memory import fault_in
from resolute.train.model.build import share_graph
from resolute.train.model.norms import batch_norms
from resolute.train.out_of_memory import DoesNotFit, out_of_memory
from resolute.train.recipe.schema import Recipe
from resolute.train.synthetic import synthetic

from .learner import Learner, in_layout, micro_batches

__all__ = [
    "announce_compilation",
    "capture_graphs",
    "check_micro_batches",
    "cpu_warm_up_shapes",
    "memory_to_spare",
    "shapes",
    "untouched",
    "warm_up",
]

_SPARE_FRAC = 0.25


def announce_compilation(device: torch.device, *, decode: Literal["cpu", "gpu"] | None = None) -> None:
    """Print what a first use of the loader on this machine compiles, and how long that takes; nothing later on.

    The durations were measured on two cores of a server.
    """
    # why here: they need the compiler
    from resolute.pipeline.graph.kernels.augment import apply_ops
    from resolute.pipeline.graph.kernels.jpeg.region import decode_region

    on_cpu = device.type == "cpu"
    if (decode == "gpu" or is_cached(decode_region)) and (not on_cpu or is_cached(apply_ops)):
        return
    what = f"compiling the loader's kernels (about {25 if on_cpu else 10} s)"
    if has_cache(decode_region):
        print(f"{what}, once; later runs take them from the cache", flush=True)
    else:
        print(f"{what}, at every start: no cache folder is writable; set NUMBA_CACHE_DIR to one that is", flush=True)


def shapes(
    plan: Plan, *, rank: int = 0, world_size: int = 1, stages: Collection[int] | None = None
) -> list[tuple[str, int, int]]:
    """All (split, res in px, local batch size) of the run or of `stages`, largest first; equally many on every rank."""
    local_sizes = {}
    for phase in plan.phases:
        if stages is None or phase.stage in stages:
            for (res, size), local_size in phase.local_shapes(rank=rank, world_size=world_size).items():
                local_sizes[phase.split, res, size] = local_size
    # why the largest first: the allocator's blocks then fit all later shapes
    order = sorted(local_sizes, key=lambda shape: (-shape[2] * shape[1] ** 2, shape))
    return [(split, res, local_sizes[split, res, size]) for split, res, size in order]


def cpu_warm_up_shapes(todo: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Of shapes as from `shapes`, those worth their time on a CPU, which compiles no kernels per shape.

    The largest batch of each training resolution, for memory; one sample of each validation resolution, which the
    network might refuse.
    """
    largest: dict[tuple[str, int], int] = {}
    for split, res, size in todo:
        largest[split, res] = max(size if split == "train" else 1, largest.get((split, res), 0))
    return [(split, res, size) for (split, res), size in largest.items()]


def check_micro_batches(plan: Plan, learner: Learner) -> None:
    """Raise `ResoluteError`, naming the key, if a step has a micro-batch that batch norms cannot normalise.

    That is a single image whose feature map shrinks to one pixel, which torch would refuse only when it occurs.
    """
    recipe, ranks = learner.recipe, learner.ranks
    if recipe.model.norm == "sync" and ranks.world_size > 1:
        _check_equal_parts(plan, recipe.optim.grad_accum_steps, world_size=ranks.world_size)
        return
    if not batch_norms(learner.network):
        return
    steps: dict[tuple[int, int, int, int], Phase] = {}  # (stage, res, samples over all ranks, on this rank)
    for phase in plan.phases:
        if phase.split == "train":
            local = phase.local_shapes(rank=ranks.rank, world_size=ranks.world_size)
            steps |= {(phase.stage, *shape, size): phase for shape, size in local.items()}
    for (stage, res, global_size, size), phase in steps.items():
        smallest = min(len(part) for part in torch.arange(size).chunk(recipe.optim.grad_accum_steps))
        if smallest > 1:
            continue
        if not _normalises_one(learner, stage, res):
            cause = _too_small(recipe, phase, (res, global_size, size), world_size=ranks.world_size)
            raise ResoluteError(
                f"{cause}: got 1 sample, expected at least 2 for the batch norms of {recipe.model.name} at "
                f'{res} px; change it, or set model.norm = "group"'
            )


def _check_equal_parts(plan: Plan, parts: int, *, world_size: int) -> None:
    """Raise `ResoluteError` if ranks would divide a step into different numbers of micro-batches.

    Synchronised norms communicate in each of them, and would wait for ever.
    """
    for phase in plan.phases:
        for _, size in phase.local_shapes(rank=0, world_size=1) if phase.split == "train" else ():
            if size % world_size and size // world_size < parts:
                raise ResoluteError(
                    f'optim.grad_accum_steps: got {parts} with model.norm = "sync" and a batch of {size} samples on '
                    f"{world_size} processes, expected at most {size // world_size}, or a batch that they divide "
                    "equally; change one"
                )


def _normalises_one(learner: Learner, stage: int, res: int) -> bool:
    """Whether the network in training mode accepts a single image of `res` px in `stage`."""
    image = torch.zeros(1, 3, res, res, device=learner.device)
    with untouched(learner.network), torch.no_grad(), learner.autocast():
        learner.enter(stage)
        try:
            learner.network.forward(image)  # why not __call__: it would compile
        except ValueError as error:
            if "more than 1 value per channel" in str(error):
                return False
            raise
    return True


def _too_small(recipe: Recipe, phase: Phase, shape: tuple[int, int, int], *, world_size: int) -> str:
    """The key, its value, and how it leads to a micro-batch of a single sample.

    `shape`: of the step: resolution in px, samples over all ranks, and on this rank.
    """
    res, global_size, local_size = shape
    batch_size = recipe.stages[phase.stage].batch_size_at(res)
    of_ranks = f" on {world_size} ranks" if world_size > 1 else ""
    if local_size > 1:
        return (
            f"optim.grad_accum_steps: {recipe.optim.grad_accum_steps} micro-batches of the {global_size} "
            f"samples per step{of_ranks} (stage {phase.stage}) leave one of a single sample"
        )
    if batch_size < 2 * world_size:
        return f"stages[{phase.stage}].batch_size: {batch_size}{of_ranks} is a single sample per step"
    return (
        f"stages[{phase.stage}].batch_size: {batch_size}{of_ranks} leaves a last batch of a single sample "
        f"of the epoch's {phase.samples}"
    )


def warm_up(
    learner: Learner,
    todo: list[tuple[str, int, int]],
    before_each: Callable[[], None] = lambda: None,
    *,
    stage: int = 0,
) -> None:
    """Run what a training step and a validation compute once per shape; the teacher runs on the training shapes too.

    `todo`: as from `shapes`. `before_each` is called before each shape and may raise to stop. `stage`: whose
    layers train, with its drop rates at each shape, for which a compiled network needs graphs. Weights, statistics,
    gradients, random state and optimizer are unchanged afterwards. Raises `DoesNotFit` if a shape is out of memory,
    `ResoluteError` if the network refuses a resolution.
    """
    network, device = learner.network, learner.device
    with untouched(network):
        for split, res, size in todo:
            before_each()
            learner.enter(stage, training=split == "train")
            images = torch.zeros(size, 3, res, res, dtype=learner.image_dtype, device=device)
            images = images.to(memory_format=torch.channels_last)  # as the loader's
            try:
                if split == "train":
                    _forward_and_backward(learner, images)
                else:
                    learner.eval_outputs(images)
            except (AssertionError, RuntimeError, TypeError, ValueError, IndexError) as error:
                if out_of_memory(error):
                    raise DoesNotFit(split, res, size) from None
                # some of timm's models refuse an input size by an assertion, others fail somewhere inside
                if not isinstance(error, AssertionError) and not _accepts_only_its_own_size(learner, res):
                    raise
                reason = str(error).splitlines()[0] if str(error) else ""
                raise ResoluteError(
                    f"model: the network refuses images of {res} px ({reason}), expected a model that accepts all "
                    "resolutions of the recipe; change the model, the resolutions or, if there is one, "
                    f"model.kwargs = {{ img_size = {res} }}"
                ) from None
        if device.type == "cuda":
            cuda.synchronize(device)  # sync: warm-up ends before the clock starts


def _accepts_only_its_own_size(learner: Learner, res: int) -> bool:
    """Whether the network, which has failed with images of `res` px, works with those of timm's configuration."""
    own = getattr(learner.network, "pretrained_cfg", {}).get("input_size", (3, res, res))[-1]
    if own == res:
        return False
    try:
        with untouched(learner.network), torch.no_grad(), learner.autocast():
            learner.network.eval().forward(torch.zeros(2, 3, own, own, device=learner.device))
    except Exception:  # why so broad: whatever it is, the size is not the cause
        return False
    return True


def capture_graphs(learner: Learner, plan: Plan, before_each: Callable[[], None] = lambda: None) -> None:
    """With `precision.cuda_graphs`, capture the graph of each stage's step. Changes as little as `warm_up`.

    Raises `DoesNotFit` if a graph's memory does not fit.
    """
    if (graphs := learner.graphs) is None:
        return
    for stage in range(len(plan.stages)):
        before_each()
        spec = plan.batch(plan.largest_batch(stage))
        batch = synthetic(spec, device=learner.device, dtype=learner.image_dtype, head=learner.head)
        with untouched(learner.network):
            try:
                graphs.capture(batch)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                raise DoesNotFit("train", spec.res, len(spec)) from None


def _forward_and_backward(learner: Learner, images: torch.Tensor) -> None:
    """As `Learner.forward_backward`, but without averaging over the ranks.

    why wrapped: a graph that is compiled within DistributedDataParallel's forward pass is cut at the limits of its
    buckets, so that training averages each of them while the backward pass goes on.
    """
    wrapped = learner.ranks.wrap(learner.network)
    for part in micro_batches(in_layout(images, learner.recipe.precision), learner.recipe):
        if learner.recipe.precision.compile:
            share_graph(part)
        with learner.autocast(), learner.ranks.sync_gradients(wrapped, last=False):
            logits = wrapped(part)
            if learner.teacher is not None:
                learner.teacher(part)
        logits.float().sum().backward()


@contextlib.contextmanager
def memory_to_spare(device: torch.device) -> Iterator[None]:
    """Around the warm-up of a run on a CPU: afterwards malloc holds the memory it needed, plus 25 %, faulted in."""
    before = peak_memory_bytes(device)
    yield
    if device.type == "cpu":
        fault_in(int((1 + _SPARE_FRAC) * (peak_memory_bytes(device) - before)))


@contextlib.contextmanager
def untouched(network: nn.Module) -> Iterator[None]:
    """Restore the network's buffers, gradients and mode and the random states at the end of the block."""
    training = network.training
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    random, cuda_random = torch.get_rng_state(), cuda.rng_states()
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in network.named_buffers():
                buffer.copy_(buffers[name])
        network.zero_grad(set_to_none=True)
        network.train(training)
        torch.set_rng_state(random)
        cuda.set_rng_states(cuda_random)
