"""The files of a shard set: writing, recording, checking and repairing them."""
