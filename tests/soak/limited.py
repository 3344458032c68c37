"""`python -m tests.soak.limited WORDS`: `resolute WORDS` with time limits of seconds, so that a soak test reaches them.

Workers import the main module of the process that starts them, as `__mp_main__`: the limits are theirs too.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import functools

__all__ = ["HANG_S", "LEASE_S"]

HANG_S = 1.0  # a decoder hangs; instead of two minutes
LEASE_S = 8.0  # the lock of a killed writer on an object store expires; instead of one minute

if __name__ in ("__main__", "__mp_main__"):
    from resolute.pipeline.storage.cache import CacheSettings
    from resolute.prep.run import pool
    from resolute.prep.storage import lease

    pool.Pool = functools.partial(pool.Pool, hang_s=HANG_S)  # type: ignore[assignment, misc]
    lease._LEASE_S, lease._MARGIN_S, lease._RENEW_S = LEASE_S, 2.0, 1.0
    CacheSettings.__init__.__kwdefaults__["stall_s"] = 1.5  # a request fails; instead of 20 s

if __name__ == "__main__":
    from resolute.cli import run

    run()
