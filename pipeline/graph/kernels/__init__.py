"""Compiled kernels on pixels and bytes: numba for the CPU, Triton for the GPU."""
