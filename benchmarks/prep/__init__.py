"""Measurements of prep: rate and exactness beside other converters, and what a large set takes."""
