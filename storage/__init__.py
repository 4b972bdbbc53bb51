"""Runs that are kept: SQLAlchemy and Alembic, no torch, no interface."""

from storage.errors import (
    DatabaseLocked,
    DatabaseReadOnly,
    DatabaseUnusable,
    ImportRefused,
    RunNotFound,
    StorageError,
)
from storage.records import (
    Facets,
    ImportedIds,
    Page,
    RunFilter,
    RunMeta,
    RunSummary,
    State,
    StoredRun,
)
from storage.store import Store, open_store
from storage.writer import RunWriter

__all__ = [
    "DatabaseLocked",
    "DatabaseReadOnly",
    "DatabaseUnusable",
    "Facets",
    "ImportRefused",
    "ImportedIds",
    "Page",
    "RunFilter",
    "RunMeta",
    "RunNotFound",
    "RunSummary",
    "RunWriter",
    "State",
    "StorageError",
    "Store",
    "StoredRun",
    "open_store",
]
