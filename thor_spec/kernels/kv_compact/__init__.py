"""Moves the keys and values of an accepted path to the slots of a sequence without branches."""
