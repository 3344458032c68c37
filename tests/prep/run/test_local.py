"""Shards that workers write and shards that this process writes have the same bytes, whatever dies or fails."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from resolute.errors import ResoluteError
from resolute.prep.convert.batch import EncodeOptions
from resolute.prep.run.local import convert_shards, whole_shards
from resolute.prep.run.pool import Pool
from resolute.prep.run.stats import RunStats
from resolute.prep.shard_set.record import ShardRecord
from resolute.prep.shard_set.writer import ShardSpec
from resolute.prep.sources.image_ref import ByteRange
from resolute.prep.storage.hashed_file import AtomicFile
from resolute.prep.storage.output import LocalStore
from tests.support.faulty_worker import serve
from tests.support.trees import tree

OPTIONS = EncodeOptions(quality=90, label_digits=4)
EACH = 40  # images per shard: three batches
SHARDS = 5  # with two workers, the first three are written by workers
IN_WORKER, IN_PARENT = 1, 4  # numbers of shards


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory, scene: Callable[..., NDArray[np.uint8]]) -> list[Path]:
    """What `files` copies; never changed."""
    folder = tmp_path_factory.mktemp("originals")
    paths = [folder / f"{i:03d}.jpg" for i in range(EACH * SHARDS)]
    for i, path in enumerate(paths):
        Image.fromarray(scene(i, 40, 30)).save(path)
    return paths


@pytest.fixture
def files(tmp_path: Path, originals: list[Path]) -> list[Path]:
    folder = Path(shutil.copytree(originals[0].parent, tmp_path / "photos"))
    return [folder / path.name for path in originals]


@pytest.fixture
def pools() -> Iterator[Callable[[], Pool]]:
    """Makes pools of two forked workers, which inherit what a test has patched by then."""
    made: list[Pool] = []

    def make() -> Pool:
        made.append(Pool(2, "fork", serve, hang_s=1.0))
        return made[-1]

    yield make
    for pool in made:
        pool.end()


def specs(files: list[Path]) -> list[ShardSpec]:
    return [
        ShardSpec(
            generation_hash="plan",
            contents_sha256=None,
            split="train",
            number=number,
            first_key=EACH * number,
            byte_ranges=tuple(ByteRange(str(path)) for path in files[EACH * number : EACH * (number + 1)]),
            labels=np.full(EACH, 1, np.uint32),
            resolutions=(16, 24),
            short_sides=(16, 24),
        )
        for number in range(SHARDS)
    ]


def convert(pool: Pool, shards: list[ShardSpec] | Iterator[ShardSpec], out: Path) -> tuple[RunStats, list[ShardRecord]]:
    """The totals and the records at 24 px; checks that the progress only grows and ends with the totals."""
    records: list[bytes] = []
    seen = [0]

    def progress(stats: RunStats) -> None:
        assert stats.images >= seen[-1]
        seen.append(stats.images)

    sizes = [EACH] * len(shards) if isinstance(shards, list) else ()
    stats = convert_shards(pool, OPTIONS, shards, LocalStore(out), sizes=sizes, done=records.append, progress=progress)
    assert seen[-1] == stats.images == EACH * SHARDS
    parsed = sorted((ShardRecord.parse(record) for record in records), key=lambda record: (record.number, record.res))
    assert [(record.number, record.res) for record in parsed] == [(n, res) for n in range(SHARDS) for res in (16, 24)]
    return stats, parsed[1::2]


def partial_files(out: Path) -> list[Path]:
    return list(out.rglob("*.partial"))


def at_writes(monkeypatch: pytest.MonkeyPatch, name: str, step: str, hook: Callable[[], None]) -> None:
    """Call `hook` when the file `name` is created, written or closed."""
    create = LocalStore.create

    def hooked(store: LocalStore, opened: str) -> AtomicFile:
        file = create(store, opened)
        if opened == name:
            method = getattr(file, step)

            def call(*args: bytes) -> None:
                hook()
                method(*args)

            setattr(file, step, call)
        return file

    monkeypatch.setattr(LocalStore, "create", hooked)


@pytest.fixture(scope="module")
def undisturbed(originals: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files that an undisturbed run writes."""
    out = tmp_path_factory.mktemp("undisturbed") / "set"
    pool = Pool(2, "fork", serve)
    convert(pool, specs(originals), out)
    pool.end()
    return tree(out)


def test_a_worker_writes_the_bytes_that_this_process_would_write(
    pools: Callable[[], Pool], files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files[50].write_bytes(b"no image")
    create = LocalStore.create

    def noted(store: LocalStore, name: str) -> AtomicFile:
        (tmp_path / "writers" / Path(name).name).write_text(str(os.getpid()))
        return create(store, name)

    def written_here() -> list[bool]:
        notes = [tmp_path / "writers" / f"train-{number:06d}.tar" for number in range(SHARDS)]
        return [note.read_text() == str(os.getpid()) for note in notes]

    (tmp_path / "writers").mkdir()
    monkeypatch.setattr(LocalStore, "create", noted)
    stats, _ = convert(pools(), specs(files), tmp_path / "many")
    assert written_here() == [False, False, False, True, True]
    assert (stats.rejects, len(stats.slowest)) == (1, 12)
    assert min(stats.read_bytes, stats.decode_s, stats.convert_s, stats.write_s) > 0
    convert(pools(), (spec for spec in specs(files)), tmp_path / "few")  # of unknown number
    assert written_here() == [True] * SHARDS
    assert tree(tmp_path / "many") == tree(tmp_path / "few")


@pytest.mark.parametrize(
    ("sizes", "workers", "count"),
    [
        ([8] * 10, 2, 8),
        ([8] * 10, 4, 6),
        ([8] * 3, 2, 1),
        ([8] * 3, 4, 0),
        ([], 2, 0),
        ([8, 2, 1], 2, 0),  # one worker would convert the first long after all others are done
        ([8] * 9 + [2, 1], 4, 6),
    ],
)
def test_shards_are_converted_whole_while_the_other_workers_have_as_much_to_do(
    sizes: list[int], workers: int, count: int
) -> None:
    assert whole_shards(sizes, workers) == count


def test_shards_are_sent_to_a_worker_that_is_busy_with_an_image(
    pools: Callable[[], Pool], files: list[Path], tmp_path: Path
) -> None:
    """However large: else this process and a worker could wait for each other."""
    for number in (0, 1):
        files[EACH * number].write_bytes(b"wait " + bytes(tmp_path / "mark"))

    class Marked(list[ShardSpec]):
        def __iter__(self) -> Iterator[ShardSpec]:
            for spec in super().__iter__():
                if spec.number == SHARDS - 2:  # the third has been sent
                    (tmp_path / "mark").touch()
                yield replace(spec, generation_hash="plan" * 250_000)

    stats, _ = convert(pools(), Marked(specs(files)), tmp_path / "set")
    assert stats.rejects == 0


def test_a_decoder_that_dies_loses_that_one_image(pools: Callable[[], Pool], files: list[Path], tmp_path: Path) -> None:
    bad, reason = [EACH * IN_WORKER + 17, EACH * IN_WORKER + 30, EACH * IN_PARENT + 3], "decoder died: SIGSEGV"
    for i in bad:
        files[i].write_bytes(b"die")
    stats, records = convert(pools(), specs(files), tmp_path / "set")
    assert sorted(stats.rejected) == [("train", i, reason) for i in bad]
    assert [reject for record in records for reject in record.rejects] == [(i, reason) for i in bad]
    assert [key for record in records for key in record.samples["key"].tolist()] == [
        i for i in range(len(files)) if i not in bad
    ]
    assert partial_files(tmp_path / "set") == []


@pytest.mark.parametrize(
    ("name", "step", "sent"),
    [
        ("16/train-000001.tar", "write", signal.SIGKILL),
        ("24/train-000001.tar", "close", signal.SIGABRT),
        ("records/train-000001-24.rec", "close", signal.SIGABRT),
    ],
)
def test_a_worker_that_dies_while_it_writes_costs_no_image(
    pools: Callable[[], Pool],
    files: list[Path],
    tmp_path: Path,
    undisturbed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    step: str,
    sent: signal.Signals,
) -> None:
    mark = tmp_path / "mark"
    mark.touch()

    def die_once() -> None:
        if mark.exists():
            faulthandler.disable()
            mark.unlink()
            os.kill(os.getpid(), sent)

    at_writes(monkeypatch, name, step, die_once)
    if sent == signal.SIGKILL:
        with pytest.raises(ResoluteError, match="died, got SIGKILL"):
            convert(pools(), specs(files), tmp_path / "set")
        assert partial_files(tmp_path / "set") == []
    stats, _ = convert(pools(), specs(files), tmp_path / "set")
    assert not mark.exists()
    assert stats.rejects == 0
    assert tree(tmp_path / "set") == undisturbed
    assert partial_files(tmp_path / "set") == []


@pytest.mark.parametrize("number", [IN_WORKER, IN_PARENT])
def test_changed_images_bugs_of_ours_and_a_lack_of_memory_end_the_run(
    pools: Callable[[], Pool], files: list[Path], tmp_path: Path, number: int
) -> None:
    shards = specs(files)
    shards[number] = replace(shards[number], contents_sha256="other")
    pool = pools()
    with pytest.raises(ResoluteError, match=f"train-{number:06d}: its images have changed since it was first made"):
        convert(pool, shards, tmp_path / "set")
    files[EACH * number + 20].write_bytes(b"bug")
    with pytest.raises(ZeroDivisionError, match="ours"):
        convert(pool, specs(files), tmp_path / "set")
    files[EACH * number + 20].write_bytes(b"memory")
    with pytest.raises(ResoluteError, match=r"machine .*: got no memory left in a worker, .*; use fewer WORKERS"):
        convert(pool, specs(files), tmp_path / "set")
    assert partial_files(tmp_path / "set") == []
