"""Text to search in, folded so that case and composition do not matter; filled in for the runs that are there.

The folding is written out here, not imported: a migration must do tomorrow what it did today.
"""

from __future__ import annotations

import json
import unicodedata

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def _fold(*parts: str) -> str:
    text = "\x1e".join(parts).replace("\0", "\ufffd")
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())


def upgrade() -> None:
    op.add_column("runs", sa.Column("label_search", sa.Text(), nullable=False, server_default=""))
    op.add_column("traces", sa.Column("search", sa.Text(), nullable=False, server_default=""))
    connection = op.get_bind()
    runs = sa.table("runs", sa.column("id"), sa.column("name"), sa.column("note"), sa.column("label_search"))
    traces = sa.table("traces", sa.column("run_id"), sa.column("body"), sa.column("search"))
    for run_id, name, note in connection.execute(sa.select(runs.c.id, runs.c.name, runs.c.note)).all():
        if name or note:
            connection.execute(sa.update(runs).where(runs.c.id == run_id).values(label_search=_fold(name, note)))
    # One body at a time: together they may be larger than memory.
    for run_id in connection.execute(sa.select(traces.c.run_id)).scalars().all():
        body = json.loads(connection.execute(sa.select(traces.c.body).where(traces.c.run_id == run_id)).scalar_one())
        prompt = body["request"].get("prompt")
        found = _fold(prompt if isinstance(prompt, str) else "", body["text"])
        connection.execute(sa.update(traces).where(traces.c.run_id == run_id).values(search=found))
