"""A shard counts as finished if it has a record of the same plan and codecs and its files exist."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import SAMPLE, SOURCE, STORED
from resolute.prep import build as building
from resolute.prep import extend
from resolute.prep.convert import codecs
from resolute.prep.convert.batch import Batch, EncodeOptions
from resolute.prep.run import worker
from resolute.prep.settings import Settings
from resolute.prep.shard_set.existing_set import PLAN
from resolute.prep.shard_set.record import ShardRecord
from resolute.prep.storage.hashed_file import FileInfo
from resolute.prep.storage.output import LocalStore, open_store
from resolute.prep.verify import verify
from tests.support.trees import tree

Prep = Callable[..., Any]


class Stopped(Exception):
    """As if the run had been killed before its manifest."""


@pytest.fixture
def argv(photos: Path, tmp_path: Path) -> tuple[object, ...]:
    return ("--src", photos, "--out", tmp_path / "s", "--res", "32,48", "--shard-samples", 10)


@pytest.fixture
def fresh(argv: tuple[object, ...], tmp_path: Path, prep: Prep) -> dict[str, str]:
    """The files of a set built without interruption."""
    assert prep(*argv[:2], "--out", tmp_path / "fresh", *argv[4:]).status == 0
    return tree(tmp_path / "fresh")


def stop_before_the_manifest(prep: Prep, argv: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object) -> None:
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(building, "finalize_set", stop)
        with pytest.raises(Stopped):
            prep(*argv)


def with_other_digest(data: bytes) -> bytes:
    """A record as if a photo had changed between two runs, undetected."""
    record = ShardRecord.parse(data)
    sources = record.sources.copy()
    sources["digest"][3] += np.uint64(1)
    return replace(record, sources=sources).to_bytes()


LOST = [(name, change) for name in ("32/train-000001.tar", "48/train-000000.idx", "48/val-000000.tar")
        for change in (None, lambda data: data[:-100])]  # fmt: skip
DAMAGED = [("records/train-000001-48.rec", change) for change in (
    lambda data: data[:-200], lambda data: b"junk", lambda data: data[:300] + b"!" + data[301:], with_other_digest
)]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), [*LOST, *DAMAGED])
def test_shards_with_lost_files_or_damaged_records_are_rebuilt_on_resume(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch, fresh: dict[str, str],
    name: str, change: Callable[[bytes], bytes] | None,
) -> None:  # fmt: skip
    stop_before_the_manifest(prep, argv, monkeypatch)
    file = tmp_path / "s" / name
    file.unlink() if change is None else file.write_bytes(change(file.read_bytes()))
    ran = prep(*argv)
    assert ran.status == 0, ran.err
    assert "kept 6 shards" in ran.out
    assert tree(tmp_path / "s") == fresh


def test_a_file_that_vanishes_during_the_run_is_rebuilt(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch, fresh: dict[str, str]
) -> None:
    convert, rounds = building._convert, 0

    def then_delete(*args: Any) -> Any:
        nonlocal rounds
        rounds += 1
        stats = convert(*args)
        if rounds <= allowed:
            (tmp_path / "s" / "32" / "train-000002.tar").unlink()
        return stats

    monkeypatch.setattr(building, "_convert", then_delete)
    allowed = 99
    ran = prep(*argv)
    assert (ran.status, rounds) == (2, 3)
    assert "files disappear after they are written, got shards without files such as train-000002" in ran.err
    assert not (tmp_path / "s" / "manifest.json").exists()
    allowed = rounds + 1
    assert prep(*argv).status == 0
    assert tree(tmp_path / "s") == fresh


def test_a_killed_addition_of_a_resolution_does_not_change_the_finished_set(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch, fresh: dict[str, str]
) -> None:
    assert prep(*argv).status == 0
    more = (*argv[:4], "--res", "32,48,64", *argv[6:])
    stop_before_the_manifest(prep, more, monkeypatch)
    assert {name: digest for name, digest in tree(tmp_path / "s").items() if name in fresh} == fresh
    assert "already there" in prep(*argv).out
    assert verify(open_store(str(tmp_path / "s")), workers=1).damaged == {}
    ran = prep(*more)
    assert ran.status == 0, ran.err
    assert "kept 7 shards" in ran.out
    assert prep(*argv[:2], "--out", tmp_path / "all", *more[4:]).status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "all")


def test_records_of_another_plan_are_not_trusted(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch, fresh: dict[str, str]
) -> None:
    """All files of the other plan's shards are there: only the plan's hash shows that their quality differs."""
    stop_before_the_manifest(prep, (*argv, "--quality", 95), monkeypatch)
    stop_before_the_manifest(prep, (*argv[:3], tmp_path / "other", *argv[4:]), monkeypatch)
    shutil.copy(tmp_path / "other" / PLAN, tmp_path / "s" / PLAN)
    ran = prep(*argv)
    assert ran.status == 0, ran.err
    assert "kept" not in ran.out
    assert tree(tmp_path / "s") == fresh


@pytest.mark.parametrize("what", ["manifest.json", "records/plan.json"])
@pytest.mark.parametrize("damage", [None, b"", b"junk", b"{}"])
def test_either_plan_or_manifest_can_be_lost(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, fresh: dict[str, str], what: str, damage: bytes | None
) -> None:
    assert prep(*argv).status == 0
    path = tmp_path / "s" / what
    path.unlink() if damage is None else path.write_bytes(damage)
    tars = {path: path.stat().st_mtime_ns for path in (tmp_path / "s").rglob("*.tar")}
    refused_other = prep(*argv, "--quality", 95)
    assert refused_other.status == 2
    assert "quality: got 90, expected 95" in refused_other.err
    assert prep(*argv[:4], "--res", "32", *argv[6:]).status == 0  # 48 px are kept
    assert tree(tmp_path / "s") == fresh
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "s").rglob("*.tar")} == tars


@pytest.mark.parametrize("stop", ["write", "remove", "sync"])
def test_a_rebuild_that_is_killed_keeps_no_shard_of_the_old_set(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    """The old shards may be of other photos with the same names and sizes, which no plan can distinguish."""
    assert prep(*argv).status == 0
    path = photos / "bee" / "03.jpg"
    path.write_bytes(path.read_bytes()[:-300] + bytes(300))
    real = getattr(LocalStore, stop)
    calls = 0

    def kill(store: LocalStore, name: str, *data: bytes) -> Any:
        nonlocal calls
        calls += name.startswith(("records", "manifest"))
        if calls > 1 or stop == "sync":
            raise Stopped
        return real(store, name, *data)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, stop, kill)
        with pytest.raises(Stopped):
            prep(*argv, "--rebuild", "--max-bad", 0.1)
    ran = prep(*argv, "--max-bad", 0.1)
    if ran.status == 2:
        assert "REBUILD=1" in ran.err
        ran = prep(*argv, "--rebuild", "--max-bad", 0.1)
    assert ran.status == 0, ran.err
    assert "kept" not in ran.out
    assert prep(*argv[:2], "--out", tmp_path / "fresh", *argv[4:], "--max-bad", 0.1).status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "fresh")


def test_every_flipped_byte_of_a_record_is_detected() -> None:
    samples, sources, stored = (np.ones(2, dtype) for dtype in (SAMPLE, SOURCE, STORED))
    files = {"32/train-000000.tar": FileInfo(nbytes=9, sha256="0" * 64)}
    record = ShardRecord(
        plan="p", split="train", number=0, res=32, samples=samples, sources=sources, stored=stored, files=files,
        rejects=((7, "not an image"),),
    )  # fmt: skip
    data = record.to_bytes()
    assert ShardRecord.parse(data).to_bytes() == data
    for at in range(len(data)):
        with pytest.raises(ValueError, match="other bytes than prep wrote"):
            ShardRecord.parse(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])


@pytest.fixture
def other_codecs(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """From here on, this process has another Pillow."""
    with monkeypatch.context() as patch:
        versions = {**codecs.codec_versions(), "Pillow": "7.7.7"}
        patch.setattr(building, "codec_versions", lambda: versions)
        patch.setattr(codecs, "codec_versions", lambda: versions)
        yield patch


def refused(ran: Any, installed: str, made_with: str) -> None:
    assert ran.status == 2, ran.out
    assert ran.err.count("\n") == 1
    assert f"Pillow: got {installed}, expected {made_with}; install those versions" in ran.err
    assert "REBUILD=1" in ran.err


def test_the_manifest_names_the_codec_versions(argv: tuple[object, ...], tmp_path: Path, prep: Prep) -> None:
    assert prep(*argv).status == 0
    named = json.loads((tmp_path / "s" / "manifest.json").read_bytes())["codecs"]
    assert named == codecs.codec_versions()
    assert {"simplejpeg", "Pillow", "libjpeg-turbo in simplejpeg"} <= named.keys()
    assert "none" not in (named["libjpeg-turbo in Pillow"], named["libjpeg-turbo in simplejpeg"])


def test_an_unfinished_run_is_not_continued_with_other_codecs(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    stop_before_the_manifest(prep, argv, monkeypatch)
    (tmp_path / "s" / "records" / "val-000000-48.rec").unlink()
    installed = codecs.codec_versions()["Pillow"]
    patch = request.getfixturevalue("other_codecs")
    refused(prep(*argv), "7.7.7", installed)
    patch.undo()
    assert prep(*argv).status == 0


def test_no_shards_of_other_codecs_are_added_to_a_finished_set(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, request: pytest.FixtureRequest
) -> None:
    assert prep(*argv).status == 0
    before = tree(tmp_path / "s")
    installed = codecs.codec_versions()["Pillow"]
    request.getfixturevalue("other_codecs")
    assert "already there" in prep(*argv).out
    refused(prep(*argv[:4], "--res", "32,48,64", *argv[6:]), "7.7.7", installed)
    assert tree(tmp_path / "s") == before
    (tmp_path / "s" / "48" / "train-000001.tar").unlink()
    refused(prep(*argv), "7.7.7", installed)


def set_codecs(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    for module in (building, extend, codecs):
        monkeypatch.setattr(module, "codec_versions", lambda: versions)


def test_a_set_is_not_continued_with_other_pixel_code(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_before_the_manifest(prep, argv, monkeypatch)
    (tmp_path / "s" / "records" / "val-000000-48.rec").unlink()
    set_codecs(monkeypatch, {**codecs.codec_versions(), "Resolute's pixels": str(codecs.PIXELS + 1)})
    ran = prep(*argv)
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert "begun with other pixel code, so further shards would differ" in ran.err
    assert f"Resolute's pixels: got {codecs.PIXELS + 1}, expected {codecs.PIXELS}" in ran.err


def test_derived_files_are_repaired_with_any_codecs(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, request: pytest.FixtureRequest
) -> None:
    assert prep(*argv).status == 0
    before = tree(tmp_path / "s")
    request.getfixturevalue("other_codecs")
    (tmp_path / "s" / "_info.json").unlink()
    ran = prep(*argv)
    assert ran.status == 0, ran.err
    assert tree(tmp_path / "s") == before


def test_a_worker_with_other_codecs_than_its_run_converts_nothing() -> None:
    """As on a node of a cluster, or after an upgrade during the run."""
    versions = {**codecs.codec_versions(), "libjpeg-turbo in simplejpeg": "1.5.0"}
    job = EncodeOptions(quality=90, label_digits=4, codecs=versions)
    with pytest.raises(ResoluteError, match=r"machine .*libjpeg-turbo in simplejpeg: got .*, expected 1\.5\.0"):
        worker.convert(job, Batch(first_key=0, byte_ranges=(), labels=(), short_sides=(16,)))


requests: Counter[str] = Counter()
open_reads = 0
max_open_reads = 0
counting = threading.Lock()


@dataclass(frozen=True)
class Counted(LocalStore):
    """A folder that counts its requests, as an object store's bill would."""

    def size(self, name: str) -> int | None:
        requests[f"size {name}"] += 1
        return super().size(name)

    def sizes(self, folder: str = "") -> dict[str, int]:
        requests["list"] += 1
        return super().sizes(folder)

    def names(self, folder: str = "") -> list[str]:
        requests["list"] += 1
        return super().names(folder)

    def read(self, name: str) -> bytes:
        global open_reads, max_open_reads
        with counting:
            requests[f"read {name}"] += 1
            open_reads += 1
            max_open_reads = max(max_open_reads, open_reads)
        time.sleep(0.02)
        with counting:
            open_reads -= 1
        return super().read(name)


def test_each_record_is_read_once_and_files_are_listed_not_probed(
    photos: Path, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    global max_open_reads
    argv = ("--src", photos, "--out", tmp_path / "s", "--res", "32", "--shard-samples", 3)
    stop_before_the_manifest(prep, argv, monkeypatch)
    records = len(list((tmp_path / "s" / "records").glob("*.rec")))
    assert records == 20
    monkeypatch.setattr(building, "open_store", lambda out: Counted(Path(out)))
    settings = Settings(src=str(photos), out=str(tmp_path / "s"), res=(32,), shard_samples=3, workers=1)

    def run() -> Counter[str]:
        requests.clear()
        building.build(settings)
        return Counter(requests)

    max_open_reads = 0
    resumed = run()
    reads = {what: times for what, times in resumed.items() if what.endswith(".rec")}
    names = [f"{split}-{n:06d}" for split, shards in (("train", 18), ("val", 2)) for n in range(shards)]
    assert reads == {f"read records/{name}-32.rec": 1 for name in names}
    assert max_open_reads > 4
    assert not [what for what in resumed if what.startswith("size 32/")]
    assert resumed["list"] < 20
    again = run()
    assert not [what for what in again if what.startswith(("size 32/", "size index/"))]
    assert max(times for what, times in again.items() if what != "list") <= 3  # the manifest, before and under the lock
    assert again["list"] < 15
