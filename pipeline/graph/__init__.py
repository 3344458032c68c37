"""The DALI graph that turns encoded images into batches, and the compiled kernels it uses."""

from resolute.errors import check_stack

check_stack("resolute.pipeline")
