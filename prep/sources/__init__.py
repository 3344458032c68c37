"""The formats that photos come in: listed, opened and read."""
