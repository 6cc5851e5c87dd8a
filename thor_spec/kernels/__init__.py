"""Kernels that stand on their own: one folder per operation, its definition in torch beside its Triton code."""
