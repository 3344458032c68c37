"""A run's measurements and the files that they are written to."""
