"""The Kubernetes API, for the distribution and for the controller of sandboxes."""
