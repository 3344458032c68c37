"""A shard set: its plan, the list of its photos, its files, and how they are written, recorded and checked."""
