"""One recurrent state per sequence: drafts are verified against it, and only what was accepted is added.

vLLM keeps a state per draft position, K + 1 for every sequence and layer. Here ``layer`` verifies through our kernels,
which leave a record in scratch of the size of a batch, and ``steps`` folds the accepted part of it into the one state.
See docs/design/one_state.md.
"""
