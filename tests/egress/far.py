"""Who is far away on the small internet of the conformance suite."""

from k8e.conformance.lab.far import CALLING_PORT, OTHER, WEB, WEB6

__all__ = ["CALLING_PORT", "OTHER", "WEB", "WEB6"]
