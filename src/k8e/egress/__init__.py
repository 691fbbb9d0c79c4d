"""Egress: default deny; names are allowed, not addresses; the kernel enforces it."""
