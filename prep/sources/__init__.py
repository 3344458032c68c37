"""Readers of the formats that photos come in: detection, listing and reading."""
