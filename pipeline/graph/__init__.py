"""The DALI graph that turns encoded images into batches, and the compiled kernels it uses."""

from resolute.errors import ResoluteError

try:
    import nvidia.dali as _dali  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("nvidia", "nvidia.dali"):
        raise
    raise ResoluteError(
        "nvidia.dali: not installed, expected the package of a CUDA stack; run `make env`, or "
        "`pip install 'resolute-vision[cuda13]'` (`[cuda12]` for drivers before 580, `[cpu]`)"
    ) from None
