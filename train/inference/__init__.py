"""A trained run in use: evaluation, prediction, export."""
