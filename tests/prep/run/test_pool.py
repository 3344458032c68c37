"""The process pool: what a worker that crashes, never ends or cannot start costs; test_local.py has more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from resolute.errors import ResoluteError
from resolute.prep.convert.batch import Batch, BatchResult, EncodeOptions
from resolute.prep.run import pool as pooling
from resolute.prep.run.pool import Pool
from resolute.prep.sources.image_ref import ByteRange
from tests.support.faulty_worker import crash_at_start, exit_at_start, serve

JOB = EncodeOptions(quality=90, label_digits=4)


@pytest.fixture
def files(tmp_path: Path, scene: Callable[..., NDArray[np.uint8]]) -> list[Path]:
    """40 small JPEGs."""
    paths = [tmp_path / f"{i:02d}.jpg" for i in range(40)]
    for i, path in enumerate(paths):
        Image.fromarray(scene(i, 40, 30)).save(path)
    return paths


@pytest.fixture
def pool() -> Iterator[Pool]:
    opened = Pool(2, "fork", serve, hang_s=1.0)
    yield opened
    opened.end()


def tasks(files: list[Path]) -> list[Batch]:
    return [
        Batch(
            first_key=first,
            byte_ranges=tuple(ByteRange(str(path)) for path in files[first : first + 4]),
            labels=(1,) * len(files[first : first + 4]),
            short_sides=(16, 24),
        )
        for first in range(0, len(files), 4)
    ]


def run(pool: Pool, files: list[Path]) -> list[BatchResult]:
    return [result for _, result in pool.run(JOB, tasks(files)) if isinstance(result, BatchResult)]


def keys(chunks: list[BatchResult]) -> list[int]:
    return [key for chunk in chunks for key in chunk.samples["key"].tolist()]


def test_a_worker_that_crashes_once_loses_no_image(pool: Pool, files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    files[9].write_bytes(b"die once " + bytes(tmp_path / "mark"))
    assert keys(run(pool, files)) == list(range(40))
    assert not (tmp_path / "mark").exists()


@pytest.mark.timing
@pytest.mark.slow
def test_an_image_that_never_ends_is_rejected_in_bounded_time(pool: Pool, files: list[Path]) -> None:
    files[13].write_bytes(b"spin")
    files[29].write_bytes(b"hang")
    chunks = run(pool, files)
    reason = "decoder hung: more than 1 s"
    assert [reject for chunk in chunks for reject in chunk.rejects] == [(13, reason), (29, reason)]
    assert keys(chunks) == [key for key in range(40) if key not in (13, 29)]


@pytest.mark.parametrize(("max_megapixels", "is_hung"), [(None, True), (60, True), (671, False)])
def test_a_photo_has_more_time_in_a_set_of_larger_photos(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, max_megapixels: int | None, is_hung: bool
) -> None:
    monkeypatch.setattr(pooling, "_POLL_S", 0.05)
    files[0].write_bytes(b"slow")
    pool = Pool(1, "fork", serve, hang_s=0.2)
    try:
        found = [result for _, result in pool.run(replace(JOB, max_megapixels=max_megapixels), tasks(files[:4]))]
    finally:
        pool.end()
    (result,) = found
    assert isinstance(result, BatchResult)
    assert [key for key, _ in result.rejects] == [0] * is_hung


def test_time_while_the_run_was_stopped_does_not_count_against_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the whole run is stopped with Ctrl-Z, or its container is paused: the clock jumps between two looks."""
    clock, state, cpu_s = 1000.0, "S", 5.0
    monkeypatch.setattr(pooling, "monotonic", lambda: clock)
    monkeypatch.setattr(pooling, "_main_thread", lambda pid: (state, cpu_s))
    watch = pooling._Watch()

    def look(after_s: float, cpu: float, now: str) -> float:
        nonlocal clock, state, cpu_s
        clock, state, cpu_s = clock + after_s, now, cpu_s + cpu
        watch.observe(31, 0)
        return watch.busy_s

    assert look(0.5, 0.1, "R") == 0.0
    assert look(0.5, 0.0, "S") == 0.5
    assert look(3600.0, 0.0, "S") == 1.5  # everything was stopped for an hour
    assert look(3600.0, 0.0, "T") == 1.5  # the worker was
    assert look(60.0, 0.25, "R") == 1.75  # it waited for a core
    assert look(60.0, 0.0, "D") == 1.75  # and for a disk
    watch.observe(32, 0)
    assert watch.busy_s == 0.0


@pytest.mark.parametrize(
    ("serve", "message"),
    [(crash_at_start, "WORKERS: 3 processes died before their first image"), (exit_at_start, "exit status 3")],
)
def test_workers_that_cannot_start_end_the_run(files: list[Path], serve: Callable[..., None], message: str) -> None:
    pool = Pool(2, "fork", serve)
    with pytest.raises(ResoluteError, match=message):
        run(pool, files)
    pool.end()
