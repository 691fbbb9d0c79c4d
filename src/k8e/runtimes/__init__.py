"""Runtimes launch guests. Everything else is said to the guest itself, over the link."""
