"""Training with progressive resizing: a recipe and a shard set in, a run folder with log and checkpoints out."""
