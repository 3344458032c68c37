"""prep rebuilds exactly the files that verify reported as damaged, to the same bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resolute.prep.verify import to_rebuild
from tests.support.cli import verify
from tests.support.trees import tree

Prep = Callable[..., Any]
Damage = Callable[[Path], None]


def flip(at: int) -> Damage:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return damage


DAMAGE: dict[str, dict[str, Damage]] = {
    "shards": {
        "48/train-000001.tar": flip(5000),
        "32/train-000002.tar": Path.unlink,
        "32/val-000000.tar": lambda path: os.truncate(path, 20_000),
        "32/train-000000.idx": flip(9),
    },
    "derived files": {
        "index/train-48.npy": flip(200),
        "index/val-48.npy": Path.unlink,
        "index/val.npy": flip(140),
        "index/val.sources.jsonl": flip(4),
        "_info.json": flip(60),
        "croissant.json": flip(3),
    },
    "manifest": {"manifest.json": flip(60)},
    "plan": {"records/plan.json": flip(60)},
    "records": {"records/train-000001-48.rec": flip(700), "records/val-000000-32.rec": Path.unlink},
}


def state(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


@pytest.mark.slow
@pytest.mark.parametrize("what", DAMAGE)
def test_prep_rebuilds_what_verify_reported_and_nothing_else(
    argv: tuple[object, ...], copied: Path, prep: Prep, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    before = tree(copied)
    manifest = json.loads((copied / "manifest.json").read_bytes())
    for name, damage in DAMAGE[what].items():
        damage(copied / name)
    kept = {path: state(path) for path in copied.glob("[0-9]*/*.*") if not path.name.startswith("_info")}
    assert verify([str(copied), "--workers", "2"]) == 1
    out = capfd.readouterr().out
    assert all(f"\n  {name}: " in out for name in DAMAGE[what])
    assert out.count("\n  ") == len(DAMAGE[what]) + out.count("to rebuild")
    ran = prep(*argv)
    assert ran.status == 0, ran.err
    assert tree(copied) == before
    assert not (copied / "damaged.json").exists()
    shards = {f"{res}/{name}" for res, names in to_rebuild(manifest, set(DAMAGE[what])).items() for name in names}
    for path, was in kept.items():
        same = f"{path.parent.name}/{path.stem}" not in shards
        assert (state(path) == was) == same, path
    assert verify([str(copied), "--workers", "2"]) == 0
