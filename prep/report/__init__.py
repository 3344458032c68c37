"""What the user sees of a set: the HTML report and the console summary."""
