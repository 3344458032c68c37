"""Training learns as before: the losses of 40 steps equal the stored ones."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from resolute.cli import main
from resolute.train.logs.metrics import read_log
from tests.train.conftest import stages, train_words

# The losses of `RECIPE`, on the set of `shard_root`. To be made again only after a change that is meant to change them.
GOLDEN = Path(__file__).with_name("golden_losses.json")
# Mean relative difference to the stored losses. Two threads in place of one: 1.6e-4, since sums in another order round
# differently and 40 steps amplify it; other vector instructions (no AVX): 2e-7; 10 % more learning rate, no flips,
# other crops or another mean or deviation of the pixels: from 5e-3 on.
TOLERANCE = 1e-3
RECIPE = f"""
seed = 3
model = {{ name = "test_resnet" }}
optim = {{ lr = 0.01 }}
loss = {{ label_smoothing = 0.1 }}
precision = {{ amp = "off" }}
eval = {{ every_epochs = 8, batch_size = 16 }}
{stages((32, 8, 16))}"""


def test_the_losses_of_40_steps_equal_the_stored_ones(shard_root: Path, tmp_path: Path) -> None:
    (tmp_path / "golden.toml").write_text(RECIPE)
    assert main(train_words(shard_root, tmp_path / "golden.toml", tmp_path)) == 0
    losses = [r["loss"] for r in read_log(tmp_path / "golden" / "run.jsonl") if r["kind"] == "step"]
    expected = json.loads(GOLDEN.read_text())
    assert statistics.fmean(abs(got / loss - 1) for got, loss in zip(losses, expected, strict=True)) < TOLERANCE
