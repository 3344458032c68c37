"""The benchmark of near copies in the validation, once on tiny data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resolute.benchmarks import siblings
from tests.benchmarks.test_whole import tiny
from tests.conftest import make_photos
from tests.support.commands import timed_in_forks


@pytest.mark.nightly
def test_copies_of_training_photos_are_in_val_at_random_and_not_with_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "timed", timed_in_forks(siblings.timed, tmp_path))
    photos = make_photos(tmp_path / "photos", each=20)
    recipe = tiny(tmp_path, "siblings", [(32, 1), (48, 1)])
    recipe.write_text(recipe.read_text() + "[ema]\ndecay = 0.9\n")
    monkeypatch.setattr(siblings, "RECIPE", recipe)
    monkeypatch.setattr(siblings, "_SIZES", "32,48")
    out = tmp_path / "siblings.json"
    assert siblings.main(["--photos", str(photos), "--originals", "30", "--seeds", "0", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["photos"] == {"originals": 30, "copies": 13, "truth": 30}
    for side in ("at random", "GROUP"):
        assert result["summary"][side]["top1"]["n"] == 1
        assert 0 <= result["summary"][side]["true_top1"]["mean"] <= 1
    assert siblings.main(["--photos", str(photos), "--originals", "31", "--out", str(out)]) == 2
