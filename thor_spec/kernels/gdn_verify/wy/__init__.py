"""Closed-form variant: one triangular solve per head instead of one step per token."""
