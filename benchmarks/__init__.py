"""Benchmarks: each prints a figure, what it stands beside in the same run, and the ratio."""
