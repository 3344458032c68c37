"""`python -m resolute.benchmarks.gpu_check`: everything about a GPU that matters to a run, in one command of ten minutes."""
