"""Compares whole trainings of several tools, see `__main__.py`."""
