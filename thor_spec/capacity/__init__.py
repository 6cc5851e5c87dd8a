"""What fits into memory, from a model's ``config.json`` alone: arithmetic, without torch, vLLM or weights."""
