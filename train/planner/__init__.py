"""Before a run: measured steps, the time and memory that the run will take, and the batch size that fits."""
