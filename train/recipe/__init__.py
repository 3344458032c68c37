"""The recipe: one TOML file with every value that can change a run's results, parsed into frozen dataclasses."""
