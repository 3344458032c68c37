"""The optimizer with its parameter groups, and the learning rate of each step."""
