"""`resolute gpu-check`: all about a GPU in a quarter of an hour, as one command.

Every part runs in a process of its own with its own time limit, so that neither a failure nor a crash nor a hang stops
the parts after it or loses what it had measured. Written to the folder `--out` after each part: report.html and
gpu-check.json, with the log and the results of parts beside them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resolute.benchmarks.cli import chosen
from resolute.benchmarks.options import GpuCheckOptions
from resolute.benchmarks.record import find_device, header
from resolute.errors import ResoluteError
from resolute.files import output_file, write_errors

from .parts import PARTS
from .result import Part, Report, Result, Settings

__all__ = ["headline", "main", "overall", "run_part"]

_SETUP_S = 120  # for the shard set
_CPU_TIMES = 5  # time limits on a CPU, where other work may run beside the check, relative to those on a GPU


def run_part(part: Part, folder: Path, *, limit_s: float, words: Sequence[str] = ()) -> Result:
    """Run a part in a new process and return its result; a crash, or more than `limit_s` s, is a failure.

    What the part had found until then is kept. Its output goes to `folder`/NAME.log. `words`: the command, for tests.
    """
    file, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    file.unlink(missing_ok=True)
    words = words or [sys.executable, "-m", "resolute.benchmarks.gpu_check.parts", part.name, str(folder)]
    with log.open("wb") as output:
        # why passive: on a CPU, OpenMP threads that spin while waiting take cores from the loader's threads
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        process = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        problem = ""
        try:
            status = process.wait(limit_s)
            if status:
                problem = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            problem = f"no result after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # its own children too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    result = Report.load(file)
    if result is not None and not problem:
        return result
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
    summary = f"{problem or 'wrote no result'}; last line of {log.name}: {lines[-1][:300]}"
    if result is None:
        return Result(verdict="failed", summary=summary)
    return dataclasses.replace(result, verdict="failed", summary=summary)


def overall(results: Sequence[Result]) -> tuple[str, str]:
    """("passed" or "failed", one line): failed if any part is."""
    counts = {
        verdict: sum(result.verdict == verdict for result in results) for verdict in ("passed", "failed", "skipped")
    }
    line = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return "failed" if counts["failed"] else "passed", line


def headline(settings: Settings, values: dict[str, dict[str, Any]]) -> str:
    """The loader's rate relative to the model's at each resolution, and the cores it uses; "" without both rates."""
    loader, training, parts = values.get("loader", {}), values.get("training", {}), []
    for res in settings.resolutions:
        if f"{res} plain" in loader and str(res) in training:
            alone = loader[f"{res} plain"]
            model = training[str(res)]["images_per_s"]["synthetic"]["median"]
            parts.append(f"{alone['images_per_s'] / model:.1f} at {res} px ({alone['cores']:.1f} cores)")
    if not parts:
        return ""
    return (
        f"Images that the loader delivers for each image that {settings.model} trains on: {', '.join(parts)}; "
        f"batches of {settings.train_batch_size}, {settings.threads} loader threads."
    )


def main(args: GpuCheckOptions) -> int:
    """Run the check; returns 1 if a part failed. Raises `ResoluteError`."""
    began, names = time.monotonic(), [part.name for part in PARTS]
    only, device, folder = chosen(args.only or names, names), find_device(args.device), args.out
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    memory_gib = 0.0
    if device.type == "cuda":
        from resolute import cuda

        memory_gib = cuda.total_bytes(device) / 2**30
    settings = Settings.for_device(
        device.type,
        folder=folder.resolve(),
        shards=args.shards or str(folder.resolve() / "shards"),
        threads=args.threads,
        memory_gib=memory_gib,
    )
    minutes = args.minutes or (15 if settings.on_gpu else 60)
    record = header(device=device)
    if args.shards is None:
        _make_shards(settings)
    else:
        from resolute.pipeline.dataset.shard_set import ShardSet

        settings = dataclasses.replace(settings, resolutions=ShardSet.open(args.shards).resolutions)
    settings.save(folder / "settings.json")
    results: list[tuple[Part, Result, float]] = []
    for part in (part for part in PARTS if part.name in only):
        part_began = time.monotonic()
        left_s = 60 * minutes - (part_began - began)
        if left_s < 10:
            result = Result(verdict="skipped", summary=f"the {minutes:g} minutes are over")
        else:
            limit_s = part.limit_s * (1 if settings.on_gpu else _CPU_TIMES)
            result = run_part(part, folder, limit_s=min(limit_s, left_s))
        results.append((part, result, time.monotonic() - part_began))
        print(f"{part.title}: {result.verdict}, {result.summary} ({results[-1][2]:.0f} s)", flush=True)
        verdict, line = _write(settings, record, results, took_s=time.monotonic() - began)
    print(f"{verdict}: {line}; {folder / 'report.html'}")
    return int(verdict == "failed")


def _write(
    settings: Settings, record: dict[str, Any], results: Sequence[tuple[Part, Result, float]], *, took_s: float
) -> tuple[str, str]:
    """Write the page and the file of the parts so far; returns the verdict and a line about it."""
    from resolute.report.page import render

    folder = Path(settings.folder)
    verdict, counts = overall([result for _, result, _ in results])
    sentence = headline(settings, {part.name: result.values for part, result, _ in results})
    parts = [
        {"part": part.name, "title": part.title, "took_s": round(part_s, 1), **dataclasses.asdict(result)}
        for part, result, part_s in results
    ]
    machine = record["machine"]
    page = render(
        Path(__file__).with_name("page.html"),
        title=f"GPU check: {verdict}",
        line=counts,
        headline=sentence,
        subtitle=f"{machine['gpu'] or machine['cpu']}, {took_s:.0f} s, commit {record['commit'] or 'unknown'}",
        parts=[{**part, "bad": part["verdict"] == "failed"} for part in parts],
    )
    with write_errors(folder):
        (folder / "report.html").write_bytes(page)
    without_folders = {"folder": folder.name, "shards": Path(settings.shards).name}
    document = {
        **record,
        "settings": dataclasses.asdict(settings) | without_folders,
        "verdict": verdict,
        "headline": sentence,
        "took_s": round(took_s, 1),
        "parts": parts,
    }
    with output_file(folder / "gpu-check.json") as file:
        file.write((json.dumps(document, indent=1) + "\n").encode())
    return verdict, " ".join(filter(None, [f"{counts}, {took_s:.0f} s.", sentence]))


def _make_shards(settings: Settings) -> None:
    """Demo photos and their shards, unless they are there already."""
    out, photos = Path(settings.shards), Path(settings.folder, "photos")
    res = ",".join(map(str, settings.resolutions))
    for words in (
        ["resolute.pipeline.examples.demo_photos", "--out", str(photos), "--images", str(settings.photos)],
        ["resolute", "shards", "--src", str(photos), "--out", str(out), "--res", res],
    ):
        command_words = [sys.executable, "-m", *words]
        try:
            done = subprocess.run(command_words, capture_output=True, text=True, timeout=_SETUP_S, check=False)
        except subprocess.TimeoutExpired:
            raise ResoluteError(
                f"{settings.folder}: no shard set after {_SETUP_S} s, expected one; make one and name it in --shards"
            ) from None
        if done.returncode:
            raise ResoluteError(f"{words[0]}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
