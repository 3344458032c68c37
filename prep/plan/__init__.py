"""Before conversion: every image, its class, its split, and its place in the shards."""
