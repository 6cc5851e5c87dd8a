"""Serve a hybrid language model with DFlash speculation on one edge device."""

__version__ = "0.1.0"
