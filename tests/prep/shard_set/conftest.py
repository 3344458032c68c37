"""A finished shard set and copies of it, for tests of what prep does with a set that is there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from resolute.pipeline.dataset.source_json import source_json_bytes
from tests.conftest import make_photos
from tests.support.cli import prep as run_prep

OPTIONS = ("--res", "32,48", "--shard-samples", 20)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed: `photos`, 3 classes of 20, and their finished `set`, 32 and 48 px, 3 + 1 shards."""
    folder = tmp_path_factory.mktemp("made")
    make_photos(folder / "photos", each=20)
    words = ["--src", folder / "photos", "--out", folder / "set", *OPTIONS, "--workers", 2]
    assert run_prep([str(word) for word in words]) == 0
    return folder


@pytest.fixture
def argv(made: Path, tmp_path: Path) -> tuple[object, ...]:
    """The command that makes the set of `made` at tmp_path/s."""
    return "--src", made / "photos", "--out", tmp_path / "s", *OPTIONS


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """A copy of the finished set at tmp_path/s."""
    return Path(shutil.copytree(made / "set", tmp_path / "s"))


@pytest.fixture
def own_photos(made: Path, copied: Path, tmp_path: Path) -> Path:
    """A copy of the photos, of which `copied` is the set."""
    photos = Path(shutil.copytree(made / "photos", tmp_path / "photos"))
    (copied / "source.json").write_bytes(source_json_bytes({"SRC": str(photos), "SHARD_SAMPLES": "20"}))
    return photos


@pytest.fixture
def other_photos(tmp_path: Path) -> Path:
    """Photos of other classes."""
    make_photos(tmp_path / "others", classes=2, each=12)
    (tmp_path / "others" / "class0").rename(tmp_path / "others" / "elk")
    return tmp_path / "others"
