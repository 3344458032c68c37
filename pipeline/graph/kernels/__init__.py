"""Compiled kernels: numba for the CPU, Triton for the GPU."""
