"""Finding fast launch configurations for kernels that vLLM reads from files."""
