"""The HTTP endpoint: its callers, its routes and the dialects that it serves."""
