"""What people say about runs: name, note, tags, archived, and where an imported run came from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("name", sa.String(200), nullable=False, server_default=""))
    op.add_column("runs", sa.Column("note", sa.Text(), nullable=False, server_default=""))
    op.add_column("runs", sa.Column("archived", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("runs", sa.Column("imported_from", sa.String(255)))
    op.create_table(
        "run_tags",
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("tag", sa.String(100), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "tag", name="pk_run_tags"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_tags_run_id_runs", ondelete="CASCADE"),
    )
    op.create_index("ix_run_tags_tag_run_id", "run_tags", ["tag", "run_id"])
    op.create_index("ix_runs_archived_created_at_id", "runs", ["archived", "created_at", "id"])
    op.create_index("ix_runs_target", "runs", ["target"])
    op.create_index("ix_runs_proposer", "runs", ["proposer"])
    op.create_index("ix_runs_author", "runs", ["author"])
