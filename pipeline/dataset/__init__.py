"""What a shard set is: its manifest and index on disk, opened and checked. Imports neither torch nor DALI."""
