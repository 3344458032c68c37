"""What happens to the pixels: the one DALI graph of a run, and the compiled kernels it calls."""
