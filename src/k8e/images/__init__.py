"""Root file systems that are not the host's own: folders, archives and OCI images."""
