"""Soak test: prep, verify, training and evaluation under kills and storage faults, with checks of their results.

`__main__` is the command line; `scenarios` defines the commands to run; `events` draws kills and faults; `processes`
forks commands from this preloaded interpreter; `faults` and `objects` inject storage faults; `checks` compares the
results.
"""
