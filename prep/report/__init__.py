"""What a user sees of a set: the HTML report and the closing lines."""
