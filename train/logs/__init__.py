"""Measurements of a run: run.jsonl, which has them all, and loggers that show them in other tools."""
