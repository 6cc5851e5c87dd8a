"""Run a chain or tree of draft tokens through a gated delta rule layer without a state per token."""
