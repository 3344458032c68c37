"""Executors of the conversion: a process pool on this machine, or a Ray cluster."""
