"""The photos of the sources before the conversion: one table, with classes, splits and copies."""
