"""Exposed ports: servers in sandboxes, on loopback addresses of this machine."""
