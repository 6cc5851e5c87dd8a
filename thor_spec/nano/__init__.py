"""Tiny checkpoints for the demo and the tests, made on the spot from a seed."""
