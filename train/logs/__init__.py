"""Measurements of a run and the files that hold them: run.jsonl and TensorBoard's event files."""
