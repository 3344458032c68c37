"""Imported once by the fork server: everything that worker processes need, ready to be inherited by all of them.

Garbage collection is off in the fork server, and on again in a worker; there it skips what was imported here, which
stays shared memory. The fork server ends without the interpreter's teardown, since a command waits for its end.
"""

import atexit
import gc
import os

gc.disable()

import resolute.prep.run.worker  # noqa: E402, F401

gc.freeze()
atexit.register(os._exit, 0)
