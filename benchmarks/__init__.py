"""Benchmarks, one per file. Raw values of every repeat are written as JSON, the committed ones to results/."""
