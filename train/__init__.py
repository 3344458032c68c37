"""The training loop: one recipe, one stream of batches, one run folder."""
