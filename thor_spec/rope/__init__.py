"""Rotary position tables and their scaling."""
