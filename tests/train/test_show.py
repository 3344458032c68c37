"""The contact sheet shows exactly the pixels and labels that the model is trained on."""

from __future__ import annotations

import base64
import io
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from resolute.cli import main
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.train.recipe.schema import Recipe
from resolute.train.show import model_inputs
from tests.train.conftest import stages


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(f"""
seed = 3
augment = {{ mixup_alpha = 1.0, cutmix_alpha = 1.0 }}
eval = {{ batch_size = 8 }}
{stages((32, 1, 8))}augment = {{ mixup_prob = 0.0 }}
{stages((48, 2, 16))}""")
    return path


@pytest.mark.slow
def test_rows_equal_the_first_training_batches_of_each_stage(shard_set: ShardSet, recipe_file: Path) -> None:
    recipe = Recipe.load(recipe_file)
    rows = model_inputs(shard_set, recipe, count=6)
    assert [row.title.split(", epoch")[0] for row in rows] == [
        "stage 0, training, 32 px",
        "stage 0, validation, 32 px",
        "stage 1, training, 48 px",
        "stage 1, validation, 48 px",
    ]
    assert [row.pixels.shape for row in rows] == [(6, 32, 32, 3)] * 2 + [(6, 48, 48, 3)] * 2
    plan = Plan(shard_set, recipe.stages, seed=recipe.seed, eval_batch_size=8)
    first_batch = next(s for s in plan.phases if s.stage == 1 and s.split == "train").first
    with Loader(plan, device="cpu") as loader:
        batch = next(batch for batch in loader if batch.spec.index == first_batch)
    mean, std = np.array(recipe.data.mean), np.array(recipe.data.std)
    pixels = batch.images[:6].permute(0, 2, 3, 1).numpy() * std + mean
    assert np.abs(rows[2].pixels / 255 - pixels).max() <= 0.5 / 255 + 1e-6
    stored = shard_set.splits["train"].stored[batch.spec.stored_res]
    for original, sample in zip(rows[2].originals, batch.spec.ids, strict=False):
        assert len(original) == stored["nbytes"][sample]
        assert zlib.crc32(original) == stored["crc32"][sample]
    np.testing.assert_array_equal(rows[2].crops, batch.spec.crops[:6])
    for i, line in enumerate(rows[2].lines):
        own, other = (shard_set.classes[int(labels[i])] for labels in (batch.labels, batch.partner_labels))
        lam = float(batch.lam[i])
        assert line == (own if lam == 1 else f"{lam:.2f} {own}\n{1 - lam:.2f} {other}")
    assert all(" " not in line for row in (rows[0], rows[1], rows[3]) for line in row.lines)  # not mixed: a name


def test_the_sheet_draws_these_pixels_beside_their_originals(
    shard_root: Path, shard_set: ShardSet, recipe_file: Path, tmp_path: Path
) -> None:
    words = ["show", str(shard_root), "--recipe", str(recipe_file), "--out", str(tmp_path / "seen.html")]
    assert main([*words, "--count", "5"]) == 0
    page = (tmp_path / "seen.html").read_text()
    rows = model_inputs(shard_set, Recipe.load(recipe_file), count=5)
    drawn = re.findall('image/webp;base64,(.+?)"', page)
    for data, pixels in zip(drawn, (pixels for row in rows for pixels in row.pixels), strict=True):
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))), pixels)
    assert re.findall("<h2>(.*?)</h2>", page) == [row.title for row in rows]
    assert page.count('alt="original of the next image" src="data:image/jpeg') == len(drawn)
    assert "<br>".join(rows[2].lines[0].split("\n")) in page
