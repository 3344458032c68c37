"""From encoded images to batches: reader threads, prefetching, buffers, and the loader itself."""
