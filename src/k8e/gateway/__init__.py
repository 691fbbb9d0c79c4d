"""The gateway: one process that serves every dialect on top of the sessions."""
