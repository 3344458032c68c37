"""Soak test: prep, verify, training and evaluation under kills and storage faults, and checks of what they leave.

`__main__` is the command line, `scenarios` what is run, `events` what happens to it, `processes` how it is forked from
this preloaded interpreter, `faults` and `objects` how storage fails, `checks` what must hold afterwards.
"""
