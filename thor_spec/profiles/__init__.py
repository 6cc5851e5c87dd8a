"""What is known about serving a model on a board: options, shapes, sources, and how sure anybody is."""
