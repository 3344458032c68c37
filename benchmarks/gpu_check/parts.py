"""The list of the check's parts, and the program that runs one of them in a process of its own.

    python -m resolute.benchmarks.gpu_check.parts NAME FOLDER      # reads FOLDER/settings.json, writes FOLDER/NAME.json

A part returns a `Result`; an exception is a failure that its message explains. Targets apply to a GPU only: on a CPU
the same code runs at sizes that say nothing about speed.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import correctness, facts, speed
from .result import Part, Report, Result, Settings

__all__ = ["PARTS", "run"]

# in this order, since the last ones are skipped when the time is over
PARTS = (
    Part(name="device", title="Device and driver", limit_s=30),
    Part(name="kernels", title="Kernels against the CPU's, on equal images", limit_s=60),
    Part(name="pixels", title="Pixels of the loader's batches against the CPU's", limit_s=60),
    Part(name="buffers", title="Memory of batches that are dropped early", limit_s=40),
    Part(name="loader", title="Loader alone", limit_s=75),
    Part(name="switch", title="Cost of a stage switch", limit_s=120),
    Part(name="training", title="Live against synthetic batches", limit_s=150),
    Part(name="sync", title="20 steps without a synchronisation", limit_s=40),
    Part(name="graphs", title="CUDA graphs", limit_s=60),
    Part(name="resume", title="Kill and resume", limit_s=150),
    Part(name="memory", title="Out of memory, and batch_size = auto", limit_s=90),
    Part(name="decoders", title="Decoding on the GPU", limit_s=120),
    Part(name="compiled", title="Live against synthetic batches, compiled", limit_s=120),
    Part(name="sanitizer", title="compute-sanitizer", limit_s=100),
    Part(name="trace", title="Profile of 10 steps", limit_s=60),
    Part(name="ranks", title="Two ranks", limit_s=240),
    Part(name="tests", title="GPU tests", limit_s=180),
)

_FUNCTIONS: dict[str, Callable[[Settings, Report], Result]] = {
    "device": facts.device,
    "kernels": correctness.kernels,
    "pixels": correctness.pixels,
    "buffers": correctness.buffers,
    "loader": speed.loader,
    "training": speed.training,
    "switch": speed.switch,
    "sync": correctness.sync,
    "graphs": correctness.graphs,
    "resume": correctness.resume,
    "memory": correctness.memory,
    "decoders": speed.decoders,
    "compiled": speed.compiled,
    "sanitizer": correctness.sanitizer,
    "trace": speed.trace,
    "ranks": speed.ranks,
    "tests": correctness.tests,
}
_LIGHT = ("tests", "resume", "memory", "decoders", "ranks", "sanitizer")  # parts that only start other processes


def run(name: str, settings: Settings) -> None:
    """Run a part and write its file. An exception is a failure."""
    import traceback

    report = Report(Path(settings.folder, f"{name}.json"))
    try:
        result = _FUNCTIONS[name](settings, report)
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())
        result = Result(verdict="failed", summary=f"{type(error).__name__}: {text[:500]}")
    report.save(result)


def main(argv: Sequence[str] | None = None) -> int:
    name, folder, *more = sys.argv[1:] if argv is None else argv
    settings = Settings.load(Path(folder, "settings.json"))
    settings = Settings(**{**vars(settings), "folder": folder})
    if not settings.on_gpu and name not in _LIGHT:
        import torch

        torch.set_num_threads(settings.threads)
    if name == "decoder":
        kind, load = more
        print(json.dumps(speed.decoder(settings, kind, float(load) if load else None)))
    elif name == "rank":
        if (found := speed.rank(settings, more[0])) is not None:
            print(json.dumps(found))
    else:
        run(name, settings)
    return 0


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
