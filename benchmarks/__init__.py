"""Benchmarks, each a program or a command, which writes the raw values of all rounds as JSON; results/ keeps some."""
