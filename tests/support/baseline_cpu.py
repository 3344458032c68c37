"""Environment variables with which numba compiles for a CPU that has only what every one has.

Optimised little: that takes a third of the time, and the results are the same.
"""

from __future__ import annotations

__all__ = ["BASELINE_CPU"]

BASELINE_CPU = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_OPT": "1"}
