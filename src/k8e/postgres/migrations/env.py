"""Alembic's environment of each migration: on the given connection, in one transaction."""

from __future__ import annotations

from alembic import context

from k8e.postgres.schema import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
