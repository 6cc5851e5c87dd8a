"""Commit what a step accepted to the states of all layers at once, and save the state at a block boundary on the way."""
