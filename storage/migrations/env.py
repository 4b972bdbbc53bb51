"""Alembic's entry: migrates the connection it is handed, in the transaction that the caller has begun.

A new revision is a new file in ``versions``; ``tests/storage/test_migrations.py`` holds models and revisions together.
"""

from __future__ import annotations

from alembic import context

from storage.models import Base

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("migrations are run by storage.migrate.upgrade, which hands over a connection")

context.configure(connection=connection, target_metadata=Base.metadata, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
