"""Charts are drawn here."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from tests.conftest import savefig


@pytest.fixture(autouse=True)
def drawn_charts(undrawn_charts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figure, "savefig", savefig)
