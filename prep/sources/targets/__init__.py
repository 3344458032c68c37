"""Readers of targets (a class, several labels, or numbers per image), recognised from tables, samples and rows."""
