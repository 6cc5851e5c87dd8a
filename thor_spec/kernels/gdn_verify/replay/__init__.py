"""Sequential variant: the arithmetic of one-token decoding, bit for bit."""
