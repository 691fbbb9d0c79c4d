"""Output of protoc, written by `make gen`; never edited."""
