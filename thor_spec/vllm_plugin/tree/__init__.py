"""Verification of draft trees in vLLM's V2 runner. See docs/design/tree.md.

``speculator`` builds the trees, ``topology`` keeps them by request, ``attention`` and the one-state layers let each
node see its own path, ``sampler`` walks, and ``steps`` keeps what the accepted path has written.
"""
