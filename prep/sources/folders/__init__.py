"""Folders of photos: how they are listed, and whether they look like classes."""
