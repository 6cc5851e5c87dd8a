"""Commit what a step accepted to the states of all layers, and save states at block boundaries on the way."""
