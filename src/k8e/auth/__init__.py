"""Credentials of remote callers: API keys, and client certificates issued for them."""
