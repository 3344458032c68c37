"""`Loader` and its parts: reader threads, and prefetching from remote storage."""
