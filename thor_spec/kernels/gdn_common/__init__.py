"""What verification and commit of gated delta rule layers share."""
