"""Measurements of slow storage, of the index of large sets, and of the orders in which samples are read."""
