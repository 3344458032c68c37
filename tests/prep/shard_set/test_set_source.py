"""The record of a set's source: suggested commands are complete, and no set is silently replaced by other photos."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.dataset.source_json import parse_source_json, shards_command, source_json_bytes
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
    argv = (
        "--src",
        photos,
        "--out",
        out,
        "--quality",
        85,
        "--val-list",
        tmp_path / "val.txt",
        "--max-bad",
        "0.5",
        "--seed",
        3,
        "--shard-samples",
        20,
    )
    (photos / "bee" / "bad.jpg").write_bytes(b"junk")
    assert prep(*argv, "--res", "32,64").status == 0
    before = {name: digest for name, digest in tree(out).items() if name.startswith(("32/", "64/"))}
    with pytest.raises(ResoluteError, match="96 px") as error:
        ShardSet.open(out, resolutions=(32, 96))
    assert words_of(str(error.value))["RES"] == "32,64,96"
    assert run_suggestion(str(error.value), tmp_path, prep).status == 0
    assert before.items() <= tree(out).items()
    assert sorted(ShardSet.open(out).resolutions) == [32, 64, 96]


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


def test_source_json_holds_no_credentials_and_its_command_is_quoted_for_shells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record = parse_source_json(
        source_json_bytes({"SRC": "https://me:secret@host/a.zip?token=secret", "VAL": "v/{0..3}.tar"})
    )
    assert record == {"SRC": "https://host/a.zip?token=***", "VAL": str(tmp_path / "v/{0..3}.tar")}
    assert shards_command("o", [64, 32], {**record, "SRC": "it's"}) == (
        "`make shards SRC='it'\"'\"'s' VAL='v/{0..3}.tar' OUT=o RES=32,64`"
    )
