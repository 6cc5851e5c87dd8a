"""Attention of draft nodes to a paged cache and to their own ancestors."""
