"""Benchmarks: ratios measured within one process."""
