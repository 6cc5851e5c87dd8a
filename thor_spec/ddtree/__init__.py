"""Draft trees: build, lay out, walk (DDTree, arXiv:2604.12989)."""
