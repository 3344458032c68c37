"""`resolute shards`, `verify` and `jobs`: each function takes its command's settings and prints the result."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from resolute.console import counted, say
from resolute.errors import strip_credentials
from resolute.machine import available_cpus
from resolute.urls import is_url

from .settings import JobsFinishOptions, JobsPlanOptions, JobsRangeOptions, Settings, ShardsOptions, VerifyOptions

if TYPE_CHECKING:
    from resolute.prep.run.stats import RunStats

    from .finish import BuildResult

__all__ = ["jobs_finish", "jobs_plan", "jobs_range", "shards", "verify"]

Options = TypeVar("Options", bound=JobsPlanOptions)

gc.set_threshold(50_000)  # why: collecting garbage takes a tenth of the imports' time
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # why: its threads, which nothing here uses, take 60 ms to start


def shards(options: ShardsOptions) -> None:
    """Make, complete, repair or extend a shard set. Raises `ResoluteError`."""
    options = _checked(options)
    # Imports are slow: a wrong option should not wait for them, nor a set that is finished.
    manifest_path = os.path.join(options.out, "manifest.json")  # noqa: PTH118 - of a folder
    if not options.dry and (is_url(options.out) or os.path.exists(manifest_path)):  # noqa: PTH110 - never raises
        from .unchanged import already_there, unchanged_set

        if (manifest := unchanged_set(options)) is not None:
            _print(already_there(options.out, manifest))
            return
    if options.engine == "local":
        from .run.pool import start_fork_server

        start_fork_server()
    if options.dry:
        from .estimate import dry_run

        _print(dry_run(options))
        return
    from .build import build
    from .report.report import load_template

    load_template()  # why now: this process would otherwise wait for the fork server
    with _progress_bar() as (on_start, progress):
        result = build(options, describe=say, on_start=on_start, progress=progress)
    _print(_report(options.out, result, options.worker_count if options.engine == "local" else 0))


def verify(options: VerifyOptions) -> int:
    """Check every file of a set. Returns 1 if any is damaged. Raises `ResoluteError`."""
    from tqdm import tqdm

    from resolute.prep.storage.output import open_output

    from . import verify as checks

    store = open_output(options.shards)
    with tqdm(unit="B", unit_scale=True, disable=None, dynamic_ncols=True) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        result = checks.verify(store, workers=options.workers or available_cpus(), progress=progress)
    _print(checks.summary(store, result))
    checks.write_damaged_list(store, result)
    return int(bool(result.damaged))


def jobs_plan(options: JobsPlanOptions) -> None:
    """List the photos and write the plan of a set that jobs will convert. Raises `ResoluteError`."""
    from .jobs import plan_jobs

    settings = Settings(**{**vars(_checked(options)), "engine": "jobs"})
    result = plan_jobs(settings, say)
    _print(result if isinstance(result, str) else _report(settings.out, result))


def jobs_range(options: JobsRangeOptions) -> None:
    """Convert a range of planned shards. Raises `ResoluteError`."""
    from .jobs import convert_jobs, parse_range
    from .run.pool import start_fork_server

    selected = parse_range(options.range)
    start_fork_server()
    with _progress_bar() as (on_start, progress):
        _print(
            convert_jobs(
                options.out, selected, workers=options.workers or available_cpus(), on_start=on_start, progress=progress
            )
        )


def jobs_finish(options: JobsFinishOptions) -> None:
    """Complete a set whose shards are all converted. Raises `ResoluteError`."""
    from .jobs import finalize_jobs

    _print(_report(options.out, finalize_jobs(options.out)))


def _checked(options: Options) -> Options:
    """The options with the resolutions of the set to extend. Raises `ResoluteError` without SRC."""
    if not options.src:
        from resolute.prep.shard_set.set_source import missing_source_error
        from resolute.prep.storage.output import open_output

        raise missing_source_error(open_output(options.out), options.res, extend=options.extend)
    if options.extend and not options.res:
        from resolute.prep.storage.output import open_output

        # why not `open_existing`: its imports are slow; whether the set can be extended is checked later
        with suppress(FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
            stored = json.loads(open_output(options.out).read("manifest.json"))["resolutions"]
            return dataclasses.replace(options, res=tuple(sorted(int(res) for res in stored)))
    return options


def _print(text: str) -> None:
    # why: it may quote file names, which may hold bytes that are not valid text
    print(strip_credentials(text).encode(errors="backslashreplace").decode())


@contextmanager
def _progress_bar() -> Iterator[tuple[Callable[[int, int], None], Callable[[RunStats], None]]]:
    """The functions `on_start` and `progress` of a conversion, which draw a bar on a terminal."""
    bar: Any = None  # opened when the number of images is known
    started_at = perf_counter()

    def on_start(images: int, kept_shards: int) -> None:
        from tqdm import tqdm

        nonlocal bar, started_at
        if kept_shards:
            print(f"already there: {counted(kept_shards, 'shard')}", flush=True)
        # why: disable=None shows the bar only on a terminal
        bar = tqdm(total=images, unit=" images", disable=None, dynamic_ncols=True, smoothing=0.1)
        started_at = perf_counter()

    def progress(stats: RunStats) -> None:
        rate = stats.read_bytes / 1e6 / max(1e-9, perf_counter() - started_at)
        bar.set_postfix({"MB/s": f"{rate:.0f}", "rejects": stats.rejects}, refresh=False)
        bar.update(stats.images - bar.n)

    try:
        yield on_start, progress
    finally:
        if bar is not None:
            bar.close()


def _report(out: str, result: BuildResult, workers: int = 0) -> str:
    """The summary of a set that is finished; writes its report."""
    from resolute.prep.report.browse import open_set
    from resolute.prep.report.report import write_report
    from resolute.prep.report.summary import nothing_done, summary
    from resolute.prep.storage.output import open_output

    store = open_output(out)
    if result.stats is None:
        return nothing_done(result, store)
    with open_set(store) as shards:
        text = summary(result, result.stats, shards, workers=workers)
        return f"{text}\n  report: {write_report(store, result, shards)}"
