"""Runtimes launch guests. All further commands go to the guest itself, over the link."""
