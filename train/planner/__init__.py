"""Planning a run before it starts: measured throughput, expected time and memory, and the largest batch size."""
