"""Conversion of photos in worker processes: decode, resize, encode."""
