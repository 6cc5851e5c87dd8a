"""Builds the corpus of the nano checkpoints, trains them, and packs what a GPU host needs for it."""
