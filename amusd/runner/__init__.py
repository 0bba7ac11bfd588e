"""Runs passes of a model: captured on a GPU, eager otherwise, on one rank or several."""
