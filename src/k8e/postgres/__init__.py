"""Stores in PostgreSQL, for several gateways on one database; imported only where one is set."""
