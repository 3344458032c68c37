"""Where shards are written: a folder or an object store, with one writer and whole files."""
