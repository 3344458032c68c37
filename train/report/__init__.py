"""Reports of a run: the HTML page with charts, the diagnosis, and the console's tables."""
