"""Runs, their traces and steps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("author", sa.String(100), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("writer_token", sa.String(64)),
        sa.Column("writer_host", sa.String(255)),
        sa.Column("writer_pid", sa.BigInteger()),
        sa.Column("writer_started", sa.String(100)),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True)),
        sa.Column("target", sa.String(1000), nullable=False),
        sa.Column("proposer", sa.String(100), nullable=False),
        sa.Column("draft", sa.String(1000)),
        sa.Column("k", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("temperature", sa.Float(53)),
        sa.Column("max_new_tokens", sa.BigInteger()),
        sa.Column("dtype", sa.String(100), nullable=False),
        sa.Column("device", sa.String(100), nullable=False),
        sa.Column("baseline_id", sa.String(64)),
        sa.Column("prompt_preview", sa.Text(), nullable=False),
        sa.Column("text_preview", sa.Text(), nullable=False),
        sa.Column("finish_reason", sa.String(16)),
        sa.Column("not_speculating", sa.Text()),
        sa.Column("num_prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("num_output_tokens", sa.Integer(), nullable=False),
        sa.Column("num_spec_steps", sa.Integer(), nullable=False),
        sa.Column("num_draft_tokens", sa.Integer(), nullable=False),
        sa.Column("num_accepted_draft_tokens", sa.Integer(), nullable=False),
        sa.Column("draft_acceptance_rate", sa.Float(53)),
        sa.Column("mean_acceptance_length", sa.Float(53)),
        sa.Column("tokens_per_second", sa.Float(53)),
        sa.Column("ms_per_token", sa.Float(53)),
        sa.Column("tokens_per_step", sa.Float(53)),
        sa.Column("prefill_ms", sa.Float(53), nullable=False),
        sa.Column("ttft_ms", sa.Float(53), nullable=False),
        sa.Column("decode_ms", sa.Float(53), nullable=False),
        sa.Column("speedup", sa.Float(53)),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
    )
    op.create_index("ix_runs_state", "runs", ["state"])
    op.create_index("ix_runs_baseline_id", "runs", ["baseline_id"])
    op.create_table(
        "traces",
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("final", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_traces"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_traces_run_id_runs", ondelete="CASCADE"),
    )
    op.create_table(
        "steps",
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("step_index", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "step_index", name="pk_steps"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_steps_run_id_runs", ondelete="CASCADE"),
    )
