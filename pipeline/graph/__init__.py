"""The DALI graph that turns encoded images into batches, and the compiled kernels it uses."""
