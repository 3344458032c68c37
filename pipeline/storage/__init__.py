"""Bytes on disks and in object stores: reads with retries, a disk cache, atomic writes, locks. No torch, no DALI."""
