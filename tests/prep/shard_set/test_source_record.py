"""The record of a set's source: suggested commands are complete, and no set is silently replaced by other photos."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.dataset.source_record import parse_record, record_bytes, shards_command
from tests.support.cli import verify
from tests.support.fake_make import Make
from tests.support.trees import tree

Prep = Callable[..., Any]


@pytest.fixture(autouse=True)
def started_by_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name the commands of make; `run_suggestion` runs them."""
    monkeypatch.setenv("MAKELEVEL", "1")


def words_of(message: str) -> dict[str, str]:
    """The variables of the single `make shards` command in a message."""
    (command,) = re.findall("`make shards ([^`]*)`", message)
    return dict(word.split("=", 1) for word in shlex.split(command))


def run_suggestion(message: str, tmp_path: Path, prep: Prep) -> Any:
    """Run the command that a message suggests: through make to prep."""
    (tmp_path / "make").mkdir(exist_ok=True)
    (command,) = re.findall("`make (shards [^`]*)`", message)
    (call,) = Make(tmp_path / "make").calls(*shlex.split(command))
    shutil.rmtree(tmp_path / "make")
    assert call[:3] == ["-m", "resolute", "shards"]
    return prep(*call[3:])


@pytest.mark.slow
def test_the_suggested_command_adds_a_missing_resolution_and_changes_nothing_else(
    photos: Path, tmp_path: Path, prep: Prep
) -> None:
    out = tmp_path / "my set's"
    (tmp_path / "val.txt").write_text("bee/03.jpg\napple/05.jpg\n")
    argv = ("--src", photos, "--out", out, "--quality", 85, "--val-list", tmp_path / "val.txt", "--max-bad", "0.5",
            "--seed", 3, "--shard-samples", 20)  # fmt: skip
    (photos / "bee" / "bad.jpg").write_bytes(b"junk")
    assert prep(*argv, "--res", "32,64").status == 0
    before = {name: digest for name, digest in tree(out).items() if name.startswith(("32/", "64/"))}
    with pytest.raises(ResoluteError, match="96 px") as error:
        ShardSet.open(out, resolutions=(32, 96))
    assert words_of(str(error.value))["RES"] == "32,64,96"
    assert run_suggestion(str(error.value), tmp_path, prep).status == 0
    assert before.items() <= tree(out).items()
    assert sorted(ShardSet.open(out).resolutions) == [32, 64, 96]


def test_without_src_the_complete_command_of_the_set_is_printed(
    made: Path, copied: Path, tmp_path: Path, prep: Prep
) -> None:
    before = tree(copied)
    ran = prep("--out", copied, "--res", "64")
    assert ran.status == 2
    words = {"SRC": str(made / "photos"), "OUT": str(copied), "SHARD_SAMPLES": "20"}
    assert words_of(ran.err) == {**words, "RES": "32,48,64"}
    assert words_of(prep("--out", copied).err) == {**words, "RES": "32,48"}
    assert tree(copied) == before
    ran = prep("--out", tmp_path / "none")
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert "SRC: got none" in ran.err
    assert not (tmp_path / "none").exists()


def test_a_rebuild_never_replaces_the_set_of_another_source(
    made: Path, copied: Path, other_photos: Path, prep: Prep
) -> None:
    argv = ("--src", other_photos, "--out", copied, "--res", "32")
    refused = prep(*argv)
    assert refused.status == 2
    assert f"made from {made / 'photos'}" in refused.err
    assert "REBUILD" not in refused.err
    for name, damage in (("", b""), ("manifest.json", b"{"), ("manifest.json", None), ("records/plan.json", b"{")):
        if damage is None:
            (copied / name).unlink()
        elif name:  # also where the set is unusable
            (copied / name).write_bytes(damage)
        before = tree(copied)
        refused = prep(*argv, "--rebuild")
        assert (refused.status, refused.err.count("\n")) == (2, 1)
        assert f"would replace the set of {made / 'photos'}" in refused.err
        assert tree(copied) == before


@pytest.mark.slow
def test_a_rebuild_of_the_same_photos_works_after_they_have_moved(
    own_photos: Path, copied: Path, tmp_path: Path, prep: Prep
) -> None:
    (tmp_path / "link").symlink_to(own_photos)
    (own_photos / "class1" / "003.jpg").unlink()
    assert prep("--src", tmp_path / "link", "--out", copied, "--res", "32", "--rebuild").status == 0
    own_photos.rename(tmp_path / "moved")
    assert prep("--src", tmp_path / "moved", "--out", copied, "--res", "32", "--quality", 80, "--rebuild").status == 0
    assert parse_record((copied / "source.json").read_bytes()) == {"SRC": str(tmp_path / "moved"), "QUALITY": "80"}


def test_a_set_without_a_source_record_gets_one_or_is_replaced_with_notice(
    argv: tuple[object, ...], made: Path, copied: Path, other_photos: Path, prep: Prep
) -> None:
    (copied / "source.json").unlink()
    with pytest.raises(ResoluteError, match=r"`make shards OUT=.* RES=32,48,64` with the SRC"):
        ShardSet.open(copied, resolutions=(64,))
    assert prep(*argv).status == 0
    record = parse_record((copied / "source.json").read_bytes())
    assert record == {"SRC": str(made / "photos"), "SHARD_SAMPLES": "20"}
    assert "source.json" not in json.loads((copied / "manifest.json").read_text())["files"]
    assert verify([str(copied), "--workers", "1"]) == 0
    (copied / "source.json").unlink()
    ran = prep("--src", other_photos, "--out", copied, "--res", "32", "--rebuild")
    assert ran.status == 0, ran.err
    assert "replacing a set of 60 images, 3 classes (class0, class1, class2)" in ran.err


def test_an_unfinished_run_of_other_photos_can_be_rebuilt(
    made: Path, copied: Path, other_photos: Path, prep: Prep
) -> None:
    for name in ("manifest.json", "index/train.npy", "records/train-000000-32.rec"):  # as if it had been killed
        (copied / name).unlink()
    assert words_of(prep("--out", copied, "--res", "32").err)["SRC"] == str(made / "photos")
    argv = ("--src", other_photos, "--out", copied, "--res", "32")
    assert "REBUILD=1" in prep(*argv).err
    assert prep(*argv, "--rebuild").status == 0


@pytest.mark.slow
def test_verify_prints_the_command_that_repairs_the_set(
    argv: tuple[object, ...], copied: Path, tmp_path: Path, prep: Prep, capfd: pytest.CaptureFixture[str]
) -> None:
    before = tree(copied)
    (copied / "48" / "train-000000.tar").write_bytes(b"")
    with pytest.raises(ResoluteError, match=r"train-000000\.tar: cut short") as error:
        ShardSet.open(copied)
    assert f"`make verify SHARDS={copied}`" in str(error.value)
    for damaged in ((), ("manifest.json",)):
        for name in damaged:
            (copied / name).write_bytes(b"{")
        assert verify([str(copied)]) == 1
        assert run_suggestion(capfd.readouterr().out, tmp_path, prep).status == 0
        assert tree(copied) == before
    for name in ("manifest.json", "records/plan.json"):
        (copied / name).write_bytes(b"{")
    assert verify([str(copied)]) == 1
    refused = run_suggestion(capfd.readouterr().out, tmp_path, prep)
    assert refused.status == 2
    assert "start over with REBUILD=1" in refused.err
    assert prep(*argv, "--rebuild").status == 0
    assert tree(copied) == before


def test_a_source_record_holds_no_credentials_and_its_command_is_quoted_for_shells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record = parse_record(record_bytes({"SRC": "https://me:secret@host/a.zip?token=secret", "VAL": "v/{0..3}.tar"}))
    assert record == {"SRC": "https://host/a.zip?token=***", "VAL": str(tmp_path / "v/{0..3}.tar")}
    assert shards_command("o", [64, 32], {**record, "SRC": "it's"}) == (
        "`make shards SRC='it'\"'\"'s' VAL='v/{0..3}.tar' OUT=o RES=32,64`"
    )


def test_a_damaged_source_record_is_ignored_and_no_flipped_bit_changes_its_values() -> None:
    for data in (b"", b"[]", b"{", b"{}", b'{"format": "x", "make": {"SRC": "a"}}', b"\xff"):
        assert parse_record(data) is None
    variables = {"SRC": "/photos", "QUALITY": "85"}
    data = record_bytes(variables)
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            assert parse_record(bytes(flipped)) in (None, variables)
