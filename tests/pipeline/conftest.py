"""Fixtures of the tests of the pipeline: third-party WebDataset tars, written once and copied for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.third_party_tars import write_example_set


@pytest.fixture(scope="session")
def written_tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example_set(tmp_path_factory.mktemp("wds"))


@pytest.fixture
def tars(written_tars: Path, tmp_path: Path) -> Path:
    """A folder of train-000.tar to train-002.tar and val-000.tar, without an index."""
    return Path(shutil.copytree(written_tars, tmp_path / "tars"))
