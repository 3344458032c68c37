"""Reports of a set for the user: the HTML report and the console summary."""
