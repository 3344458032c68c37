"""Measurements of prep: rate and exactness compared with other converters, and time and memory of large sets."""
