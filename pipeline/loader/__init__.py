"""`Loader` and its parts: reader threads, prefetching from remote storage, and the probe of the storage's speed."""
