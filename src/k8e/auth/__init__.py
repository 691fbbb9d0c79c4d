"""Who callers from elsewhere are: API keys, and client certificates issued for them."""
