"""Training with progressive resizing: a recipe and a shard set in, a run folder with log and checkpoints out."""

import os

# why: blocks of other sizes, as after a change of stage, then fit into memory that torch has reserved already. It reads
# the setting at its first use of a GPU
if not any(f"PYTORCH_{name}ALLOC_CONF" in os.environ for name in ("", "CUDA_", "HIP_")):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
