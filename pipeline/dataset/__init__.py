"""Shard sets: their on-disk format, and opening and checking them. No torch, no DALI."""
