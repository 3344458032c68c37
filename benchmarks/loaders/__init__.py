"""Comparison with other image loaders in common use, on the same stored images."""
