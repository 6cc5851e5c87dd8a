"""Ancestor masks and leaves of draft trees: computed once per step, read by every layer."""
