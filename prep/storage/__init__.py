"""Output storage: a local folder or an object store, with atomic files and a single writer."""
