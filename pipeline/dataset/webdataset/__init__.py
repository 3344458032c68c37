"""WebDataset tars that others made, indexed once and read in place. Imports neither torch nor DALI."""
