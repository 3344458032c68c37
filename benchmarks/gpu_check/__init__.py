"""`resolute gpu-check`: everything about a GPU that matters to a run, in one command of a quarter of an hour."""
