"""prep rebuilds exactly the files that verify reported as damaged, to the same bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resolute.prep.verify import to_rebuild
from tests.support.cli import verify as main
from tests.support.trees import tree

Prep = Callable[..., Any]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "48/train-000001.tar": lambda path: flip(path, 5000),
    "32/train-000002.tar": Path.unlink,
    "32/val-000000.tar": lambda path: os.truncate(path, 20_000),
    "32/train-000000.idx": lambda path: flip(path, 9),
    "index/train-48.npy": lambda path: flip(path, 200),
    "index/val-48.npy": Path.unlink,
    "index/val.npy": lambda path: flip(path, 140),
    "index/val.sources.jsonl": lambda path: flip(path, 4),
    "_info.json": lambda path: flip(path, 60),
    "croissant.json": lambda path: flip(path, 3),
    "manifest.json": lambda path: flip(path, 60),
    "records/plan.json": lambda path: flip(path, 60),
    "records/train-000001-48.rec": lambda path: flip(path, 700),
    "records/val-000000-32.rec": Path.unlink,
}


@pytest.mark.parametrize("damaged", DAMAGE)
def test_prep_rebuilds_what_verify_reported_and_nothing_else(
    photos: Path, tmp_path: Path, prep: Prep, capfd: pytest.CaptureFixture[str], damaged: str
) -> None:
    argv = ("--src", photos, "--out", tmp_path / "s", "--res", "32,48", "--shard-samples", 20)
    assert prep(*argv).status == 0
    before = tree(tmp_path / "s")
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_bytes())
    assert main([str(tmp_path / "s"), "--workers", "2"]) == 0
    DAMAGE[damaged](tmp_path / "s" / damaged)
    kept = {path: state(path) for path in (tmp_path / "s").glob("[0-9]*/*.*") if not path.name.startswith("_info")}
    assert main([str(tmp_path / "s"), "--workers", "2"]) == 1
    out = capfd.readouterr().out
    assert f"\n  {damaged}: " in out
    assert out.count("\n  ") == 1 + out.count("to rebuild")
    again = prep(*argv)
    assert again.status == 0, again.err
    assert tree(tmp_path / "s") == before
    assert not (tmp_path / "s" / "damaged.json").exists()
    shards = {f"{res}/{name}" for res, names in to_rebuild(manifest, {damaged}).items() for name in names}
    for path, was in kept.items():
        same = f"{path.parent.name}/{path.stem}" not in shards
        assert (state(path) == was) == same, path
    assert main([str(tmp_path / "s"), "--workers", "2"]) == 0


def state(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns
