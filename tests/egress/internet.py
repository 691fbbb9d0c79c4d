"""The small internet of the conformance suite, for tests too."""

from k8e.conformance.lab.internet import FAR, FAR6, HOST, HOST6, PORTS, RESOLVER, Internet

__all__ = ["FAR", "FAR6", "HOST", "HOST6", "PORTS", "RESOLVER", "Internet"]
