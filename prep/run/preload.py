"""Imported once by the fork server: everything that worker processes need, ready to be inherited by all of them.

Garbage collection is off in the fork server, and on again in a worker; there it skips what was imported here, which
stays shared memory. The fork server ends without the interpreter's teardown, since a command waits for its end.
"""

import atexit
import gc
import os
import sys
from typing import Any

gc.disable()

# why: numba would import SciPy, which takes a tenth of a second, only to see whether it has BLAS; nothing here needs it
modules: dict[str, Any] = sys.modules
modules["scipy"] = None
import resolute.prep.run.worker  # noqa: E402, F401

del modules["scipy"]

gc.freeze()
atexit.register(os._exit, 0)
