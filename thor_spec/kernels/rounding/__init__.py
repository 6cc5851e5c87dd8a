"""Rounding to a narrower type, the same on a device and under the interpreter."""
