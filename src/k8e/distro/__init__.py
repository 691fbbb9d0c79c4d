"""The Kubernetes distribution: ``k8e server`` and ``k8e agent``.

It supervises unmodified upstream components and writes their configuration; it is no scheduler,
network, membership or store of its own.
"""
