"""Measures k8e beside what it must be compared with; ``python -m benchmarks --help``."""
