"""Soak test: prep, verify, training and evaluation under kills and storage faults, with checks of their results.

`__main__` is the command line and `run` the main loop; `scenarios` defines the commands and `checks` compares their
results; `events` draws kills and faults, which `faults.c` injects; `processes` starts commands.
"""
