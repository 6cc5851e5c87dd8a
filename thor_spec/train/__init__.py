"""Training of the nano checkpoints, and of DFlash drafters for other small targets. Needs torch; imported lazily."""
