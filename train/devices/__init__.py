"""Where a run computes: its device, its processes, and their memory."""
