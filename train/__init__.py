"""Training with progressive resizing: a recipe and a shard set in, a run folder with log and checkpoints out."""

from resolute.errors import check_installed

check_installed("timm", setting="resolute.train", extra="train")
