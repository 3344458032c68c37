"""The data pipeline: one planned sequence of batches for a complete progressive-resizing run.

    storage/   bytes from disks and object stores
    dataset/   shard sets
    plan/      samples, crops, flips and mixes of batch i
    graph/     decoding and augmentation in one DALI graph
    loader/    iterates over the batches, for a training loop

Each package imports only those above it; `storage`, `dataset` and `plan` need neither torch nor DALI.
"""
