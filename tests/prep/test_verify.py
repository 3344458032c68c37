"""`make verify` detects every changed byte and names its file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from resolute.fork_server import fork_server
from resolute.pipeline.dataset.manifest import manifest_bytes
from resolute.prep import verify as verifying
from resolute.prep.shard_set.file_check import check_file
from resolute.prep.shard_set.record import ShardRecord
from resolute.prep.storage.hashed_file import FileInfo
from resolute.prep.storage.output import LocalStore
from resolute.prep.verify import verify
from tests import ROOT
from tests.support.cli import verify as main
from tests.support.damage import flip
from tests.support.manifests import read_joined, update_manifest
from tests.support.s3 import s3_server  # noqa: F401  # a fixture
from tests.support.trees import tree

OUTSIDE = {"README.md", "report.html", "damaged.json", "source.json"}


@pytest.fixture
def whole(shard_root: Path, tmp_path: Path) -> Path:
    """A copy of the finished set, to be damaged: 3 training shards, 1 of validation, 32/48/64 px."""
    return Path(shutil.copytree(shard_root, tmp_path / "set"))


def files(folder: Path) -> list[str]:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return sorted(names - OUTSIDE)


def test_an_intact_set_is_reported_as_sound_in_one_line(whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = tree(whole)
    (whole / "damaged.json").write_text('["32/train-000000.tar"]')
    assert main([str(whole), "--workers", "2"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith(f"{whole}: sound, 90 samples, 3 resolutions, 4 shards, ")
    assert (out.count("\n"), err) == (1, "")
    assert tree(whole) == before
    assert not (whole / "damaged.json").exists()
    assert main([f"file://{whole}"]) == 0


def test_every_damaged_file_is_reported(whole: Path) -> None:
    rng = np.random.default_rng(1)
    expected = [name for name in files(whole) if not name.startswith("manifest") and (whole / name).stat().st_size]
    for name in expected:
        flip(whole / name, int(rng.integers((whole / name).stat().st_size)))
    assert list(verify(LocalStore(whole), workers=2).damaged) == expected


def test_an_image_that_does_not_decode_is_reported_even_if_its_hash_matches(whole: Path) -> None:
    """As if it had been encoded in faulty memory."""
    path = whole / "records" / "val-000000-32.rec"
    record = ShardRecord.parse(path.read_bytes())
    offset, nbytes = (int(record.stored[name][3]) for name in ("offset", "nbytes"))
    data = bytearray((whole / "32" / "val-000000.tar").read_bytes())
    data[offset + 200 : offset + nbytes] = bytes(nbytes - 200)
    (whole / "32" / "val-000000.tar").write_bytes(data)
    stored = record.stored.copy()
    stored["crc32"][3] = zlib.crc32(data[offset : offset + nbytes])
    path.write_bytes(replace(record, stored=stored).to_bytes())
    info = FileInfo(nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    fault = check_file(LocalStore(whole), "32/val-000000.tar", info)
    assert fault is not None
    assert fault.startswith(f"sample {record.samples['key'][3]:09d}: its JPEG cannot be decoded, got '")


def test_missing_truncated_and_unexpected_files_are_distinguished(
    whole: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (whole / "32" / "train-000001.tar").unlink()
    os.truncate(whole / "48" / "train-000002.tar", 1000)
    (whole / "64" / "train-000009.tar").write_bytes(b"")
    (whole / "mine").mkdir()
    (whole / ".damaged.json.0123456789ab.partial").touch()  # of a killed verify
    assert main([str(whole), "--workers", "1"]) == 1
    out, err = capfd.readouterr()
    assert "  32/train-000001.tar: missing\n" in out
    assert "  48/train-000002.tar: cut short, got 1000 bytes, expected " in out
    assert "  to rebuild at 32 px: train-000001\n  to rebuild at 48 px: train-000002\nrun `resolute shards --" in out
    assert "64/train-000009.tar, mine/" in err
    assert "partial" not in err
    assert json.loads((whole / "damaged.json").read_text()) == ["32/train-000001.tar", "48/train-000002.tar"]


def test_what_cannot_be_verified_is_reported_in_one_line(whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((whole / "manifest.json").read_text())
    (whole / "manifest.json").write_bytes(manifest_bytes({**manifest, "version": 99}))
    for argv, words in (
        (["nowhere"], "nowhere"),
        ([], "missing"),
        ([whole, "--workers", "-1"], "--workers"),
        ([whole], "version 8"),
    ):
        assert main(argv) == 2
        out, err = capfd.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("resolute verify: ")
        assert words in err


@pytest.mark.slow
def test_an_interrupted_verify_ends_in_one_line_and_leaves_no_process(whole: Path) -> None:
    pipe = whole / "48" / "train-000000.tar"
    pipe.unlink()
    os.mkfifo(pipe)  # why: like a slow disk, it gives its bytes when the test wants
    update_manifest(whole, sizes={"48/train-000000.tar": 0})
    process = subprocess.Popen(
        [sys.executable, "-m", "resolute", "verify", str(whole), "--workers", "2"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with pipe.open("wb"):  # why: opens when the worker does
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.3)
    _, err = process.communicate(timeout=30)  # why: ends when the last process that holds stderr has ended
    assert (process.returncode, err) == (130, "resolute verify: interrupted\n")
    assert not (whole / "damaged.json").exists()


@pytest.mark.slow
def test_damage_in_an_object_store_is_found_in_place(shard_root: Path, s3_server: str) -> None:  # noqa: F811
    fs = fsspec.filesystem("s3")
    fs.put(f"{shard_root}/", f"{s3_server}/set/", recursive=True)
    data = bytearray(fs.cat_file(f"{s3_server}/set/48/train-000001.tar"))
    data[700] ^= 16
    fs.pipe_file(f"{s3_server}/set/48/train-000001.tar", bytes(data))
    fs.rm_file(f"{s3_server}/set/64/val-000000.idx")
    # why: in a process of its own, whose workers then know the server too
    command = [sys.executable, "-m", "resolute", "verify", f"{s3_server}/set", "--workers", "2"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stderr
    assert "to rebuild at 48 px: train-000001\n  to rebuild at 64 px: val-000000\n" in ran.stdout
    damaged = json.loads(fs.cat_file(f"{s3_server}/set/damaged.json"))
    assert damaged == ["48/train-000001.tar", "64/val-000000.idx"]


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_mount_that_is_lost_during_verify_is_no_damage(
    whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], comes_back: bool
) -> None:
    """Its mount point is an empty folder then."""
    away, check = whole.with_name("away"), verifying._in_processes

    def lost(*args: Any) -> Any:
        whole.rename(away)
        whole.mkdir()
        yield from check(*args)
        if comes_back:
            whole.rmdir()
            away.rename(whole)

    monkeypatch.setattr(verifying, "_in_processes", lost)
    assert main([str(whole), "--workers", "1"]) == 2
    assert "storage was away while verify read it" in capsys.readouterr().err
    assert not list(whole.glob("damaged.json"))


def _variable(store: LocalStore, name: str, expected: FileInfo) -> str | None:
    """In place of `check_file`: a variable of the worker as the damage."""
    return os.environ.get("RESOLUTE_TEST_CREDENTIALS")


def test_workers_have_variables_that_were_set_after_the_fork_server_began(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_server()
    monkeypatch.setenv("RESOLUTE_TEST_CREDENTIALS", "later")
    monkeypatch.setattr(verifying, "check_file", _variable)
    assert {*verify(LocalStore(whole), workers=1).damaged.values()} == {"later"}


def test_damage_in_a_set_of_an_older_version_is_mended_by_a_rebuild(
    whole: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    manifest = {**read_joined(whole), "version": 7}
    (whole / "manifest.json").write_bytes(manifest_bytes(manifest))
    assert main([str(whole), "--workers", "1"]) == 0
    (whole / "32" / "train-000001.tar").unlink()
    capfd.readouterr()
    assert main([str(whole), "--workers", "1"]) == 1
    assert capfd.readouterr().out.endswith("--rebuild=1`: this version only makes older sets anew\n")
