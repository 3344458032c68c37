"""One question a file; raw values go to results/ as JSON."""
