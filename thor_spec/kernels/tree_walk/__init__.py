"""Which nodes of drafted trees are accepted: one launch for a batch, without waiting for the device."""
