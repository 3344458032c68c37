"""A shard counts as finished if it has a record of the same plan and codecs and its files exist."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import SAMPLE, SOURCE, STORED
from resolute.prep import build as building
from resolute.prep.convert import codecs
from resolute.prep.convert.batch import Batch, EncodeOptions
from resolute.prep.run import worker
from resolute.prep.shard_set.existing_set import PLAN
from resolute.prep.shard_set.record import ShardRecord
from resolute.prep.storage.hashed_file import FileInfo
from resolute.prep.storage.output import LocalStore, open_store
from resolute.prep.verify import verify
from tests.support.trees import tree

Prep = Callable[..., Any]
Argv = tuple[object, ...]


class Stopped(Exception):
    """As if the run had been killed before its manifest."""


@pytest.fixture
def whole(made: Path) -> dict[str, str]:
    """The files of the set, made without interruption."""
    return tree(made / "set")


@pytest.fixture
def run_until_manifest(prep: Prep, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def stop(*args: object) -> None:
        raise Stopped

    def run(*argv: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(building, "finalize_set", stop)
            with pytest.raises(Stopped):
                prep(*argv)

    return run


@pytest.fixture
def unfinished(argv: Argv, tmp_path: Path, run_until_manifest: Callable[..., None]) -> Path:
    """The set at tmp_path/s without its manifest and what is derived from its records."""
    run_until_manifest(*argv)
    return tmp_path / "s"


def with_other_digest(data: bytes) -> bytes:
    """A record as if a photo had changed between two runs, undetected."""
    record = ShardRecord.parse(data)
    sources = record.sources.copy()
    sources["digest"][3] += np.uint64(1)
    return replace(record, sources=sources).to_bytes()


@pytest.mark.parametrize(("damaged", "kept"), [
    ({"32/train-000001.tar": None, "48/train-000000.idx": lambda data: data[:-100]}, 2),
    ({"48/val-000000.tar": lambda data: data[:-100], "records/train-000001-48.rec": lambda data: data[:-200]}, 2),
    ({"records/train-000001-48.rec": with_other_digest}, 3),
])  # fmt: skip
def test_shards_with_lost_files_or_damaged_records_are_rebuilt_on_resume(
    argv: Argv, unfinished: Path, prep: Prep, whole: dict[str, str],
    damaged: dict[str, Callable[[bytes], bytes] | None], kept: int,
) -> None:  # fmt: skip
    for name, change in damaged.items():
        file = unfinished / name
        file.unlink() if change is None else file.write_bytes(change(file.read_bytes()))
    ran = prep(*argv)
    assert ran.status == 0, ran.err
    assert f"kept {kept} shards" in ran.out
    assert tree(unfinished) == whole


def test_a_file_that_vanishes_during_the_run_is_rebuilt(
    argv: Argv, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch, whole: dict[str, str]
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
    assert tree(tmp_path / "s") == whole


@pytest.mark.slow
def test_a_killed_addition_of_a_resolution_does_not_change_the_finished_set(
    argv: Argv, copied: Path, tmp_path: Path, prep: Prep, run_until_manifest: Callable[..., None],
    whole: dict[str, str],
) -> None:  # fmt: skip
    run_until_manifest(*argv, "--res", "32,48,64")
    assert whole.items() <= tree(copied).items()
    assert "already there" in prep(*argv).out
    assert verify(open_store(str(copied)), workers=1).damaged == {}
    ran = prep(*argv, "--res", "32,48,64")
    assert ran.status == 0, ran.err
    assert "kept 4 shards" in ran.out
    assert prep(*argv, "--res", "32,48,64", "--out", tmp_path / "all").status == 0
    assert tree(copied) == tree(tmp_path / "all")


@pytest.mark.slow
def test_records_of_another_plan_are_not_trusted(
    argv: Argv, tmp_path: Path, prep: Prep, run_until_manifest: Callable[..., None], whole: dict[str, str]
) -> None:
    """All files of the other plan's shards are there: only the plan's hash shows that their quality differs."""
    run_until_manifest(*argv, "--quality", 95)
    run_until_manifest(*argv, "--out", tmp_path / "other")
    shutil.copy(tmp_path / "other" / PLAN, tmp_path / "s" / PLAN)
    ran = prep(*argv)
    assert ran.status == 0, ran.err
    assert "kept" not in ran.out
    assert tree(tmp_path / "s") == whole


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["write", "remove", "sync"])
def test_a_rebuild_that_is_killed_keeps_no_shard_of_the_old_set(
    own_photos: Path, copied: Path, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    """The old shards may be of other photos with the same names and sizes, which no plan can distinguish."""
    argv = ("--src", own_photos, "--res", "32,48", "--shard-samples", 20, "--max-bad", 0.1)
    path = own_photos / "class1" / "003.jpg"
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
            prep(*argv, "--out", copied, "--rebuild")
    ran = prep(*argv, "--out", copied)
    if ran.status == 2:
        assert "REBUILD=1" in ran.err
        ran = prep(*argv, "--out", copied, "--rebuild")
    assert ran.status == 0, ran.err
    assert "kept" not in ran.out
    assert prep(*argv, "--out", tmp_path / "fresh").status == 0
    assert tree(copied) == tree(tmp_path / "fresh")


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
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """installed(versions): from here on, this process has these versions of codecs."""
    real = codecs.codec_versions()

    def install(versions: dict[str, str]) -> None:
        for module in (building, codecs):
            monkeypatch.setattr(module, "codec_versions", lambda: {**real, **versions})

    return install


def test_an_unfinished_run_is_not_continued_with_other_codecs_or_pixel_code(
    argv: Argv, unfinished: Path, prep: Prep, installed: Callable[[dict[str, str]], None]
) -> None:
    (unfinished / "records" / "val-000000-48.rec").unlink()
    pillow, pixels = codecs.codec_versions()["Pillow"], codecs.PIXELS
    for versions, words in (
        ({"Pillow": "7.7.7"}, f"Pillow: got 7.7.7, expected {pillow}; install those versions"),
        ({"Resolute's pixels": str(pixels + 1)}, f"Resolute's pixels: got {pixels + 1}, expected {pixels}"),
    ):
        installed(versions)
        ran = prep(*argv)
        assert (ran.status, ran.err.count("\n")) == (2, 1), ran.out
        assert words in ran.err
        assert "REBUILD=1" in ran.err
    installed({})
    assert prep(*argv).status == 0
    named = json.loads((unfinished / "manifest.json").read_bytes())["codecs"]
    assert named == codecs.codec_versions()
    assert "none" not in (named["libjpeg-turbo in Pillow"], named["libjpeg-turbo in simplejpeg"])


def test_a_finished_set_of_other_codecs_gets_derived_files_but_no_shards(
    argv: Argv, copied: Path, prep: Prep, whole: dict[str, str], installed: Callable[[dict[str, str]], None]
) -> None:
    installed({"Pillow": "7.7.7"})
    assert "already there" in prep(*argv).out
    (copied / "_info.json").unlink()
    assert prep(*argv).status == 0
    assert tree(copied) == whole
    assert "Pillow: got 7.7.7, expected " in prep(*argv, "--res", "32,48,64").err
    assert tree(copied) == whole
    (copied / "48" / "train-000001.tar").unlink()
    ran = prep(*argv)
    assert ran.status == 2
    assert "Pillow: got 7.7.7, expected " in ran.err


def test_a_worker_with_other_codecs_than_its_run_converts_nothing() -> None:
    """As on a node of a cluster, or after an upgrade during the run."""
    versions = {**codecs.codec_versions(), "libjpeg-turbo in simplejpeg": "1.5.0"}
    job = EncodeOptions(quality=90, label_digits=4, codecs=versions)
    with pytest.raises(ResoluteError, match=r"machine .*libjpeg-turbo in simplejpeg: got .*, expected 1\.5\.0"):
        worker.convert(job, Batch(first_key=0, byte_ranges=(), labels=(), short_sides=(16,)))
