"""A small internet of one's own, and a gateway whose sandboxes see no other."""
