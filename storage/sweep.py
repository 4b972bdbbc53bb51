"""Runs that say "running" although their writer is gone: find them, and write down that they were interrupted."""

from __future__ import annotations

import logging

import sqlalchemy as sa
from sqlalchemy.orm import Session

from storage.database import Database
from storage.errors import StorageError
from storage.liveness import Writer, is_alive
from storage.models import RunRow
from storage.records import State
from storage.rows import load_run, write_end

log = logging.getLogger(__name__)


def find_dead(session: Session) -> dict[str, str | None]:
    """Ids of running runs whose writer is gone, with the token of that writer."""
    rows = session.execute(
        sa.select(
            RunRow.id,
            RunRow.writer_token,
            RunRow.writer_host,
            RunRow.writer_pid,
            RunRow.writer_started,
            RunRow.heartbeat_at,
        ).where(RunRow.state == State.RUNNING.value)
    ).all()
    dead: dict[str, str | None] = {}
    for run_id, token, host, pid, started, heartbeat in rows:
        writer = Writer(host or "", pid or 0, started or "", token or "")
        if token is None or not is_alive(writer, heartbeat):
            dead[run_id] = token
    return dead


def settle(database: Database) -> set[str]:
    """Write "interrupted" where it is due. Returns the dead runs that could not be marked now, for the reader to mend.

    Reading must work while another process writes for long, or where nothing may be written: then the marks wait.
    """
    with database.read() as session:
        dead = find_dead(session)
    if not dead or database.read_only:
        return set(dead)
    try:
        for run_id, token in dead.items():
            interrupt(database, run_id, token)
    except StorageError as error:
        log.info("interrupted runs could not be marked: %s", error)
        return set(dead)
    return set()


def interrupt(database: Database, run_id: str, token: str | None) -> None:
    """Mark one run as interrupted, with the numbers of the steps it has, unless its writer has come back."""
    with database.write() as session:
        row = session.get(RunRow, run_id)
        if row is None or row.state != State.RUNNING or row.writer_token != token:
            return
        try:
            run = load_run(session, row)
        except StorageError:  # damaged: it cannot be read, but it certainly does not run
            row.state = State.INTERRUPTED.value
            return
        write_end(session, run, State.INTERRUPTED)
