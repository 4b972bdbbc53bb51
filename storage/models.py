"""The tables. A run is spread over three, so that lists stay small and quick:

- ``runs``: what lists show, filter and sort by; small columns only, no text without a bound but the note.
- ``traces``: the Run as JSON without its steps, and the text that a search looks through; one row per run.
- ``steps``: one row per step, its JSON as payload, appended while the run goes.

``run_tags`` holds one row per tag of a run. The schema is made by the migrations; a test holds the two together.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    TypeDecorator,
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

ID_LENGTH = 64


class UTCDateTime(TypeDecorator[datetime]):
    """An aware datetime, kept in UTC; SQLite and others that forget the zone get it back on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a datetime without a zone")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Base of the tables; constraint names are fixed so that every database can alter them later."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class RunRow(Base):
    """What lists show. Numbers below ``finish_reason`` are always derived from the steps."""

    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    created_at: Mapped[datetime] = mapped_column(UTCDateTime())
    author: Mapped[str] = mapped_column(String(100))
    state: Mapped[str] = mapped_column(String(16))

    # Who writes a running run: liveness.py decides by these whether the writer is gone.
    writer_token: Mapped[str | None] = mapped_column(String(64))
    writer_host: Mapped[str | None] = mapped_column(String(255))
    writer_pid: Mapped[int | None] = mapped_column(BigInteger)
    writer_started: Mapped[str | None] = mapped_column(String(100))
    heartbeat_at: Mapped[datetime | None] = mapped_column(UTCDateTime())

    target: Mapped[str] = mapped_column(String(1000))
    proposer: Mapped[str] = mapped_column(String(100))
    draft: Mapped[str | None] = mapped_column(String(1000))
    k: Mapped[int] = mapped_column(Integer)
    seed: Mapped[int] = mapped_column(BigInteger)
    temperature: Mapped[float | None] = mapped_column(Float(53))
    max_new_tokens: Mapped[int | None] = mapped_column(BigInteger)
    dtype: Mapped[str] = mapped_column(String(100))
    device: Mapped[str] = mapped_column(String(100))
    # Not a foreign key: a run outlives its baseline, and a file may name one that is not here.
    baseline_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
    prompt_preview: Mapped[str] = mapped_column(Text)
    text_preview: Mapped[str] = mapped_column(Text)
    finish_reason: Mapped[str | None] = mapped_column(String(16))

    not_speculating: Mapped[str | None] = mapped_column(Text)
    num_prompt_tokens: Mapped[int] = mapped_column(Integer)
    num_output_tokens: Mapped[int] = mapped_column(Integer)
    num_spec_steps: Mapped[int] = mapped_column(Integer)
    num_draft_tokens: Mapped[int] = mapped_column(Integer)
    num_accepted_draft_tokens: Mapped[int] = mapped_column(Integer)
    draft_acceptance_rate: Mapped[float | None] = mapped_column(Float(53))
    mean_acceptance_length: Mapped[float | None] = mapped_column(Float(53))
    tokens_per_second: Mapped[float | None] = mapped_column(Float(53))
    ms_per_token: Mapped[float | None] = mapped_column(Float(53))
    tokens_per_step: Mapped[float | None] = mapped_column(Float(53))
    prefill_ms: Mapped[float] = mapped_column(Float(53))
    ttft_ms: Mapped[float] = mapped_column(Float(53))
    decode_ms: Mapped[float] = mapped_column(Float(53))
    speedup: Mapped[float | None] = mapped_column(Float(53))

    # Revision 0002
    name: Mapped[str] = mapped_column(String(200), server_default="")
    note: Mapped[str] = mapped_column(Text, server_default="")
    archived: Mapped[bool] = mapped_column(Boolean(create_constraint=False), server_default=false())
    imported_from: Mapped[str | None] = mapped_column(String(255))
    # Revision 0003: name and note as searchable() makes them
    label_search: Mapped[str] = mapped_column(Text, server_default="")

    __table_args__ = (
        Index(None, "state"),
        Index(None, "baseline_id"),
        Index(None, "archived", "created_at", "id"),
        Index(None, "target"),
        Index(None, "proposer"),
        Index(None, "author"),
    )


class TraceRow(Base):
    """The Run without its steps. ``final``: the body holds the end of the run, not only its beginning."""

    __tablename__ = "traces"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    body: Mapped[str] = mapped_column(Text)
    final: Mapped[bool] = mapped_column(Boolean(create_constraint=False))
    # Revision 0003: prompt and output as searchable() makes them
    search: Mapped[str] = mapped_column(Text, server_default="")


class StepRow(Base):
    """One step as JSON."""

    __tablename__ = "steps"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    index: Mapped[int] = mapped_column("step_index", Integer, primary_key=True, autoincrement=False)
    payload: Mapped[str] = mapped_column(Text)


class TagRow(Base):
    """One tag of one run."""

    __tablename__ = "run_tags"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    tag: Mapped[str] = mapped_column(String(100), primary_key=True)
    position: Mapped[int] = mapped_column(Integer)

    __table_args__ = (Index(None, "tag", "run_id"),)
