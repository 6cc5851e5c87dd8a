"""Block diffusion: how LLaDA2 fills and corrects a block of masks, and the model in plain torch."""
