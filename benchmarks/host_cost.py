"""Measures what a batch of 1 024 costs the consumer's thread: planning, submitting reads, feeding, taking, labels.

    python -m resolute.benchmarks.host_cost [--rounds 3] [--batches 40]

No pixels are decoded: the graph's decoder is replaced by nodes that return an 8 x 8 px image made of the file's first
bytes, enlarged where whole images are decoded. Everything else is the real loader on JPEGs of realistic size, about
12 kB each. The consumer sleeps between batches, so that each `next()` finds its batch ready and plans, submits and
feeds exactly one other. Of each `next()` the CPU time of its thread is measured, and the real time, which includes
waiting for the interpreter's lock and, on a busy machine, for a core.

The device is simulated for `device = "cuda"`: the very GPU graph is built with its nodes on the CPU, labels are packed
and copied to unpinned memory, and Triton kernels are not launched (their parameters are packed, their output is
allocated).
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import contextlib
import functools
import io
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from .cli import Parser, check_numbers, command, show_progress, spread, summarize, text_table
from .record import check_writable, header, write

if TYPE_CHECKING:
    import torch

    from resolute.pipeline.dataset.shard_set import ShardSet

__all__ = ["CASES", "TARGETS_MS", "main", "make_shards", "measure", "measure_case", "table"]

_RES = 8  # px: smallest size at which every operation of a policy is defined
_DISTINCT = 64  # different photos in the set
_LARGEST = 196  # px: no photo is wider or higher
_BATCH_SIZE, _BATCHES_PER_EPOCH = 1024, 4
_WARM_UP = 6  # batches; three times as many are more than are read ahead

# (device and decode, recipe): targets of a batch of 1 024, in ms of the consumer's thread
TARGETS_MS = {("cpu", "plain"): 2.5, ("cpu", "rich"): 3.5, ("cuda cpu", "plain"): 2.5, ("cuda cpu", "rich"): 3.5,
              ("cuda gpu", "plain"): 4.0, ("cuda gpu", "rich"): 4.0}  # fmt: skip
CASES = tuple(TARGETS_MS)
PARTS = ("plan", "submit", "feed", "take", "rest")


def make_shards(folder: Path, samples: int) -> Path:
    """A shard set of `samples` JPEGs of 146 to 195 px and 6 to 20 kB, a tenth of them for validation; returns its path.
    """
    from PIL import Image

    from resolute.prep.build import build
    from resolute.prep.settings import Settings

    rng, files = np.random.default_rng(0), []
    for _ in range(_DISTINCT):
        sides = (int(rng.integers(146, _LARGEST)), 146)
        coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize(sides, Image.Resampling.BICUBIC))
        noisy = smooth + rng.normal(0, rng.uniform(4, 16), smooth.shape)
        file = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "jpeg", quality=90)
        files.append(file.getvalue())
    path = folder / "photos.tar"
    with tarfile.open(path, "w") as tar:
        for i in range(samples):
            for name, data in ((f"{i:06d}.jpg", files[i % _DISTINCT]), (f"{i:06d}.cls", str(i % 10).encode())):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    build(Settings(src=str(path), out=str(folder / "shards"), res=(128,)))
    return folder / "shards"


def _tiny_image(jpeg: Any, *, start: Any, shape: Any, **_: Any) -> Any:
    """Takes the place of the decoder on the CPU: an image of `_RES` px made of the file's bytes."""
    from nvidia.dali import fn

    first = fn.slice(start, 0, 1, axes=[0]) + 0 * fn.slice(shape, 0, 1, axes=[0])  # why: DALI removes unused inputs
    return fn.reshape(fn.slice(jpeg, first, 3 * _RES**2, axes=[0]), shape=[_RES, _RES, 3], layout="HWC")


def _blurred_image(jpeg: Any, **_: Any) -> Any:
    """Takes the place of the decoder on the GPU: such an image, enlarged to contain every crop."""
    from nvidia.dali import fn

    small = fn.reshape(fn.slice(jpeg, 0, 3 * _RES**2, axes=[0]), shape=[_RES, _RES, 3], layout="HWC")
    return fn.resize(small, size=[_LARGEST, _LARGEST])


@contextlib.contextmanager
def _without_pixels(device: str, decode: str) -> Iterator[None]:
    """Within the block, loaders on the CPU build the graph of `device` with `decode`, with the decoder replaced."""
    from nvidia.dali import fn
    from nvidia.dali.data_node import DataNode
    from nvidia.dali.pipeline import do_not_convert

    from resolute.pipeline.graph import gpu_finish, graph
    from resolute.pipeline.loader import loader

    with contextlib.ExitStack() as stack:
        patch: Callable[..., Any] = lambda *args: stack.enter_context(mock.patch.object(*args))  # noqa: E731
        patch(fn.decoders, "image_slice", do_not_convert(_tiny_image))
        patch(fn.decoders, "image", do_not_convert(_blurred_image))
        if device == "cuda":
            build = graph._graph
            patch(graph, "_graph", lambda **settings: build(**{**settings, "device_id": None}))
            patch(DataNode, "gpu", lambda node: node)
            patch(loader, "Graph", functools.partial(_on_device, graph.Graph, decode))
            patch(gpu_finish, "GpuFinish", _unlaunched())
        yield


def _on_device(graph: Any, place: str, **settings: Any) -> Any:
    return graph(**{**settings, "device_id": 0, "decode": place})


def _unlaunched() -> type[Any]:
    """`GpuFinish` on the CPU, whose kernels are not launched."""
    import torch

    from resolute.pipeline.graph.gpu_finish import GpuFinish

    class Unlaunched(GpuFinish):
        def __init__(self, ops: Any, **settings: Any) -> None:
            super().__init__(ops, **{**settings, "device": torch.device("cpu")})

        def warm_up(self) -> None: ...

        def __call__(self, images: Any, packed: torch.Tensor, busy: list[int]) -> torch.Tensor:
            packed.to("cpu", non_blocking=True)
            return torch.empty(tuple(images.shape()), dtype=self._dtype)

    return Unlaunched


class _Stopwatch:
    """CPU and real time of the consumer's thread in some functions, in s."""

    def __init__(self) -> None:
        self.cpu_s = dict.fromkeys(PARTS, 0.0)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **settings)
            finally:
                self.cpu_s[part] += time.thread_time() - began

        return call


def measure_case(
    shards: ShardSet, case: tuple[str, str], *, batches: int, batch_size: int, pause_s: float
) -> dict[str, float]:
    """{"cpu_ms", "real_ms", "PART_ms"}: medians over `batches` of the time per batch of the consumer's thread.

    The parts are CPU time.
    """
    from resolute.pipeline.loader.loader import Loader
    from resolute.pipeline.plan.plan import Plan
    from resolute.pipeline.plan.stage import Augment, Stage

    device, _, decode = case[0].partition(" ")
    rich = Augment(
        policy="randaugment", mixup_alpha=0.4, cutmix_alpha=1.0, mixup_mode="elem", random_erasing_prob=0.25
    )
    per_epoch = len(shards.splits["train"]) // batch_size
    stage = Stage(res=_RES, epochs=-(-(batches + 3 * _WARM_UP) // per_epoch), batch_size=batch_size,
                  fraction=per_epoch * batch_size / len(shards.splits["train"]),
                  augment=rich if case[1] == "rich" else Augment())  # fmt: skip
    plan, watch, rows = Plan(shards, [stage], eval_batch_size=None), _Stopwatch(), []
    with _without_pixels(device, decode), Loader(plan) as loader:
        loader.plan.batch = watch.timed("plan", plan.batch)  # type: ignore[method-assign]
        loader._reader.submit = watch.timed("submit", loader._reader.submit)  # type: ignore[method-assign]
        loader._graph.start = watch.timed("feed", loader._graph.start)  # type: ignore[method-assign]
        loader._graph.take = watch.timed("take", loader._graph.take)  # type: ignore[method-assign]
        for number in range(batches + _WARM_UP):
            time.sleep(pause_s)
            before = dict(watch.cpu_s)
            began = time.thread_time(), time.perf_counter()
            batch = next(loader)
            cpu_s, real_s = time.thread_time() - began[0], time.perf_counter() - began[1]
            if number >= _WARM_UP:
                parts = {f"{part}_ms": 1e3 * (watch.cpu_s[part] - before[part]) for part in PARTS}
                parts["rest_ms"] = 1e3 * cpu_s - sum(parts.values())
                rows.append({"cpu_ms": 1e3 * cpu_s, "real_ms": 1e3 * real_s, **parts})
            del batch
    return {name: float(np.median([row[name] for row in rows])) for name in rows[0]}


def measure(folder: Path, *, rounds: int, batches: int, batch_size: int, pause_s: float) -> list[dict[str, Any]]:
    """[{"case", "target_ms", "cpu_ms", "real_ms", "PART_ms"}], times `repeated`; the cases are interleaved."""
    from resolute.pipeline.dataset.shard_set import ShardSet

    shards = ShardSet.open(make_shards(folder, (_BATCHES_PER_EPOCH + 1) * batch_size))
    raw: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in CASES}
    for number in range(rounds):
        for case in CASES:
            show_progress(f"host cost, round {number + 1} of {rounds}: {' '.join(case)}")
            raw[case].append(measure_case(shards, case, batches=batches, batch_size=batch_size, pause_s=pause_s))
    return [
        {"case": " ".join(case), "target_ms": TARGETS_MS[case] if batch_size == _BATCH_SIZE else None,
         **summarize(each)} for case, each in raw.items()
    ]  # fmt: skip


def table(results: Sequence[dict[str, Any]], batch_size: int) -> str:
    rows = [
        [result["case"], spread(result["cpu_ms"], 2), f"{result['target_ms']:.1f}" if result["target_ms"] else "",
         *(f"{result[f'{part}_ms']['median']:.2f}" for part in PARTS), spread(result["real_ms"], 1)]
        for result in results
    ]  # fmt: skip
    head = ["device, decode, recipe", "CPU ms", "at most", *PARTS, "real ms"]
    return text_table(f"the consumer's thread per batch of {batch_size}, no pixels: median (min..max)", head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`."""
    parser = Parser(prog="python -m resolute.benchmarks.host_cost", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--rounds", type=int, default=3, metavar="N", help="interleaved rounds of all cases (default: %(default)s)")
    add("--batches", type=int, default=40, metavar="N", help="timed per case (default: %(default)s)")
    add("--batch-size", type=int, default=_BATCH_SIZE, metavar="N", help="samples per batch (default: %(default)s)")
    add("--pause-ms", type=float, default=50.0, metavar="MS",
        help="sleep of the consumer between batches (default: %(default)s)")  # fmt: skip
    add("--out", type=Path, default=Path("host-cost.json"), metavar="FILE", help="JSON to write (default: %(default)s)")

    def work(args: argparse.Namespace) -> None:
        from resolute.scratch import ScratchFolder

        check_numbers(args, rounds=1, batches=1, batch_size=2)
        check_writable(args.out)
        result = header(rounds=args.rounds)
        with ScratchFolder() as folder:
            cases = measure(folder, rounds=args.rounds, batches=args.batches, batch_size=args.batch_size,
                            pause_s=args.pause_ms / 1e3)  # fmt: skip
        print(table(cases, args.batch_size))
        write(args.out, {**result, "batch_size": args.batch_size, "host_cost": cases})

    return command(parser, work, argv)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
