"""Tars that others made: written once, copied for each test that asks for them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.foreign import write_all


@pytest.fixture(scope="session")
def written_tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("wds"))


@pytest.fixture
def tars(written_tars: Path, tmp_path: Path) -> Path:
    """A folder of train-000.tar to train-002.tar and val-000.tar, without an index."""
    return Path(shutil.copytree(written_tars, tmp_path / "tars"))
