"""Measures how near copies are found, see `__main__.py`."""
