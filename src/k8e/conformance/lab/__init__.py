"""A small internet for one check, and a gateway whose sandboxes see no other."""
