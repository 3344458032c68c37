"""Where conversion runs: a pool of processes on this machine, or a Ray cluster."""
