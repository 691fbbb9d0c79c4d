"""Stores in PostgreSQL, for several gateways on one database; imported where DATABASE_URL is set."""
