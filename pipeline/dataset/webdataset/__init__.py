"""Third-party WebDataset tars, indexed once and read in place. No torch, no DALI."""
