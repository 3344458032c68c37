"""A recipe: the TOML file with every value that changes the results of a run."""
