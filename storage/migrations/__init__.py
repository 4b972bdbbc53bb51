"""Alembic's environment and revisions; run by storage.migrate, never by hand."""
