"""The files of a shard set: written, recorded, checked and repaired."""
