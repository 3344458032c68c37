"""A Hugging Face Hub for tests of photos and sets in object stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub import Hub, running_hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "server").mkdir()
    with running_hub(tmp_path / "server") as hub:
        yield hub
