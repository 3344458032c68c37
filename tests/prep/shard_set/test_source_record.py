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
from PIL import Image

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.dataset.source_record import parse_record, record_bytes, shards_command
from resolute.pipeline.storage.base import open_files
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


@pytest.fixture
def other_photos(tmp_path: Path) -> Path:
    """Photos of other classes."""
    for name in ("dog", "elk"):
        (tmp_path / "others" / name).mkdir(parents=True)
        for i in range(12):
            Image.new("RGB", (60, 60), (i * 20, 90, 0)).save(tmp_path / "others" / name / f"{i}.jpg")
    return tmp_path / "others"


def test_the_suggested_command_adds_a_missing_resolution_and_changes_nothing_else(
    photos: Path, tmp_path: Path, prep: Prep
) -> None:
    out = tmp_path / "my set's"
    (tmp_path / "val.txt").write_text("bee/03.jpg\napple/05.jpg\n")
    argv = ("--src", photos, "--out", out, "--quality", 85, "--val-list", tmp_path / "val.txt", "--max-bad", "0.5",
            "--seed", 3, "--shard-samples", 20)  # fmt: skip
    (photos / "bee" / "bad.jpg").write_bytes(b"junk")
    assert prep(*argv, "--res", "32,64").status == 0
    before = tree(out)
    with pytest.raises(ResoluteError, match="96 px") as error:
        ShardSet.open(out, resolutions=(32, 96))
    assert words_of(str(error.value))["RES"] == "32,64,96"
    assert run_suggestion(str(error.value), tmp_path, prep).status == 0
    assert {name: digest for name, digest in tree(out).items() if name.startswith(("32/", "64/"))} == {
        name: digest for name, digest in before.items() if name.startswith(("32/", "64/"))
    }
    assert sorted(ShardSet.open(out).resolutions) == [32, 64, 96]


def test_without_src_the_complete_command_of_the_set_is_printed(photos: Path, tmp_path: Path, prep: Prep) -> None:
    out = tmp_path / "s"
    failed = prep("--out", out)
    assert failed.status == 2
    assert failed.err.count("\n") == 1
    assert "SRC: got none" in failed.err
    assert not out.exists()
    assert prep("--src", photos, "--out", out, "--res", "32").status == 0
    before = tree(out)
    failed = prep("--out", out, "--res", "48")
    assert failed.status == 2
    assert words_of(failed.err) == {"SRC": str(photos), "OUT": str(out), "RES": "32,48"}
    assert words_of(prep("--out", out).err)["RES"] == "32"
    assert tree(out) == before


@pytest.mark.parametrize("name", ["--out", "--labels", "--val", "--val-list", "--classes"])
def test_empty_paths_are_refused(photos: Path, tmp_path: Path, prep: Prep, name: str) -> None:
    words = {"--src": photos, "--out": tmp_path / "s", "--res": "32", name: ""}
    failed = prep(*(word for pair in words.items() for word in pair))
    assert failed.status == 2
    assert f"{name}: got an empty value" in failed.err


def test_a_rebuild_never_replaces_the_set_of_another_source(
    photos: Path, other_photos: Path, tmp_path: Path, prep: Prep
) -> None:
    out = tmp_path / "s"
    assert prep("--src", photos, "--out", out, "--res", "32").status == 0
    before = tree(out)
    failed = prep("--src", other_photos, "--out", out, "--res", "32")
    assert failed.status == 2
    assert f"made from {photos}" in failed.err
    assert "REBUILD" not in failed.err
    for damage in ({}, {"manifest.json": b"{"}, {"manifest.json": None}, {"records/plan.json": b"{"}):
        for name, data in damage.items():  # also where the set is unusable
            (out / name).unlink() if data is None else (out / name).write_bytes(data)
        before = tree(out)
        failed = prep("--src", other_photos, "--out", out, "--res", "32", "--rebuild")
        assert failed.status == 2
        assert failed.err.count("\n") == 1
        assert f"would replace the set of {photos}" in failed.err
        assert tree(out) == before


def test_a_rebuild_of_the_same_photos_works_after_they_have_moved(photos: Path, tmp_path: Path, prep: Prep) -> None:
    out = tmp_path / "s"
    assert prep("--src", photos, "--out", out, "--res", "32").status == 0
    (tmp_path / "link").symlink_to(photos)
    (photos / "bee" / "03.jpg").unlink()
    assert prep("--src", tmp_path / "link", "--out", out, "--res", "32", "--rebuild").status == 0
    photos.rename(tmp_path / "moved")
    assert prep("--src", tmp_path / "moved", "--out", out, "--res", "32", "--quality", 80, "--rebuild").status == 0
    assert parse_record((out / "source.json").read_bytes()) == {"SRC": str(tmp_path / "moved"), "QUALITY": "80"}


def test_a_replaced_set_without_a_source_record_is_described(
    photos: Path, other_photos: Path, tmp_path: Path, prep: Prep
) -> None:
    out = tmp_path / "s"
    assert prep("--src", photos, "--out", out, "--res", "32").status == 0
    (out / "source.json").unlink()
    with pytest.raises(ResoluteError, match=r"`make shards OUT=.* RES=32,48` with the SRC"):
        ShardSet.open(out, resolutions=(48,))
    ran = prep("--src", other_photos, "--out", out, "--res", "32", "--rebuild")
    assert ran.status == 0
    assert "replacing a set of 60 images, 3 classes (apple, bee, cat)" in ran.err


def test_an_unfinished_run_of_other_photos_can_be_rebuilt(
    photos: Path, other_photos: Path, tmp_path: Path, prep: Prep
) -> None:
    argv = ("--out", tmp_path / "s", "--res", "32")
    assert prep("--src", photos, *argv).status == 0
    for name in ("manifest.json", "index/train.npy", "records/train-000000-32.rec"):  # as if it had been killed
        (tmp_path / "s" / name).unlink()
    assert words_of(prep(*argv).err)["SRC"] == str(photos)
    assert "REBUILD=1" in prep("--src", other_photos, *argv).err
    assert prep("--src", other_photos, *argv, "--rebuild").status == 0


def test_a_finished_set_without_a_source_record_gets_one(photos: Path, tmp_path: Path, prep: Prep) -> None:
    argv = ("--src", photos, "--out", tmp_path / "s", "--res", "32")
    assert prep(*argv).status == 0
    (tmp_path / "s" / "source.json").unlink()
    assert prep(*argv).status == 0
    record = (tmp_path / "s" / "source.json").read_bytes()
    assert parse_record(record) == {"SRC": str(photos)}
    assert verify([str(tmp_path / "s")]) == 0


def test_verify_prints_the_command_that_repairs_the_set(
    photos: Path, tmp_path: Path, prep: Prep, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s"
    assert prep("--src", photos, "--out", out, "--res", "32,48", "--quality", 85).status == 0
    before = tree(out)
    (out / "48" / "train-000000.tar").write_bytes(b"")
    with pytest.raises(ResoluteError, match=r"train-000000\.tar: cut short") as error:
        ShardSet.open(out)
    assert f"`make verify SHARDS={out}`" in str(error.value)
    assert verify([str(out)]) == 1
    assert run_suggestion(capfd.readouterr().out, tmp_path, prep).status == 0
    assert tree(out) == before
    (out / "manifest.json").write_bytes(b"{")
    assert verify([str(out)]) == 1
    assert run_suggestion(capfd.readouterr().out, tmp_path, prep).status == 0
    assert tree(out) == before
    for name in ("manifest.json", "records/plan.json"):
        (out / name).write_bytes(b"{")
    assert verify([str(out)]) == 1
    refused = run_suggestion(capfd.readouterr().out, tmp_path, prep)
    assert refused.status == 2
    assert "start over with REBUILD=1" in refused.err
    assert prep("--src", photos, "--out", out, "--res", "32,48", "--quality", 85, "--rebuild").status == 0
    assert tree(out) == before


def test_a_source_record_holds_no_credentials_and_its_command_is_quoted_for_shells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record = parse_record(record_bytes({"SRC": "https://me:secret@host/a.zip?token=secret", "VAL": "v/{0..3}.tar"}))
    assert record == {"SRC": "https://host/a.zip?token=***", "VAL": str(tmp_path / "v/{0..3}.tar")}
    assert shards_command("o", [64, 32], {**record, "SRC": "it's"}) == (
        "`make shards SRC='it'\"'\"'s' VAL='v/{0..3}.tar' OUT=o RES=32,64`"
    )


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"{}", b'{"format": "x", "make": {"SRC": "a"}}', b"\xff"])
def test_a_damaged_source_record_is_ignored(data: bytes, tmp_path: Path) -> None:
    assert parse_record(data) is None
    (tmp_path / "source.json").write_bytes(data)
    with pytest.raises(ResoluteError, match=r"not found, expected a finished shard set; correct the path"):
        ShardSet.open(tmp_path, files=open_files(tmp_path))


def test_the_source_record_is_not_part_of_the_set(photos: Path, tmp_path: Path, prep: Prep) -> None:
    for name in ("a", "b"):
        shutil.copytree(photos, tmp_path / f"photos-{name}")
        assert prep("--src", tmp_path / f"photos-{name}", "--out", tmp_path / name, "--res", "32").status == 0
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert "source.json" not in json.loads((tmp_path / "a" / "manifest.json").read_text())["files"]


def test_no_flipped_byte_of_a_source_record_changes_its_values() -> None:
    variables = {"SRC": "/photos", "QUALITY": "85"}
    data = record_bytes(variables)
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            assert parse_record(bytes(flipped)) in (None, variables)
