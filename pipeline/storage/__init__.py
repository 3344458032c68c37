"""Bytes on disks and object stores: locks and files that appear whole or not at all. Imports neither torch nor DALI."""
