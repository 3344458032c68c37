"""Planning before the conversion: all images with their classes, splits and places in the shards."""
