"""Generator of labelled demo photos: something to train on without a download."""
