"""Benchmarks to be believed: interleaved arms, declared differences, green gates, a record of every sample."""
