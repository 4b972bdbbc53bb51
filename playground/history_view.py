"""History without Gradio: filters from controls, rows for the table, sentences, and file names of exports."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from decoder.errors import RedlineError
from storage import RunFilter, RunSummary

PAGE_SIZE = 50
ANY = ""
"""The choice of a filter that does not restrict."""

SORTS: dict[str, str] = {
    "created_at": "When",
    "target": "Target",
    "proposer": "Drafted by",
    "k": "k",
    "tokens_per_second": "Tokens/s",
    "draft_acceptance_rate": "Accepted",
    "speedup": "Speed-up",
    "author": "Author",
    "name": "Run",
}
"""Columns that the table can be sorted by, with their headings."""

ARCHIVED: dict[str, bool | None] = {"active": False, "archived": True, "all": None}


def read_filter(values: Mapping[str, Any]) -> RunFilter:
    """A filter from what the controls hold; raises RedlineError with one sentence on a date that is none."""
    since = _day(values.get("since"), "from")
    until = _day(values.get("until"), "to")
    if since and until and until < since:
        raise RedlineError("the filter's dates are the wrong way round: “from” lies behind “to”")
    k = values.get("k")
    text = values.get("text")
    return RunFilter(
        text=text.strip()[:500] if isinstance(text, str) else "",
        target=_choice(values.get("target")),
        proposer=_choice(values.get("proposer")),
        k=int(k) if isinstance(k, int | str) and str(k).isascii() and str(k).isdigit() and len(str(k)) < 7 else None,
        tag=_choice(values.get("tag")),
        author=_choice(values.get("author")),
        since=since,
        until=_next_day(until) if until else None,
        archived=ARCHIVED.get(str(values.get("archived", "active")), False),
    )


def read_order(payload: Any) -> str:
    """The column that the browser wants to sort by; raises RedlineError for one that there is not."""
    key = payload.get("key") if isinstance(payload, Mapping) else None
    if key not in SORTS:
        raise RedlineError("the list cannot be sorted by that column")
    return str(key)


def read_tags(text: str) -> tuple[str, ...]:
    """Tags from a line: separated by commas, single-spaced, without repeats. Storage refuses what it cannot keep."""
    return tuple(dict.fromkeys(tag for part in text.split(",") if (tag := " ".join(part.split()))))


def row(summary: RunSummary) -> dict[str, Any]:
    """One row for the table: text and numbers only; the browser sets them with textContent."""
    drafter = summary.proposer if summary.draft is None else summary.draft
    return {
        "id": summary.id,
        "when": summary.created_at.isoformat(),
        "name": summary.name,
        "prompt": one_line(summary.prompt_preview) or "(no prompt)",
        "target": summary.target,
        "proposer": "none (baseline)" if summary.proposer == "none" else drafter,
        "k": None if summary.proposer == "none" else summary.k,
        "tokens": summary.num_output_tokens,
        "tps": _number(summary.tokens_per_second, 1),
        "accepted": percent(summary.draft_acceptance_rate),
        "accepted_why": accepted_reason(summary),
        "speedup": f"{summary.speedup:.2f}×" if summary.speedup is not None else None,
        "speedup_why": "it is a baseline" if summary.proposer == "none" else "no baseline",
        "state": summary.state.value,
        "author": summary.author,
        "tags": list(summary.tags),
        "note": one_line(summary.note),
        "archived": summary.archived,
        "imported": summary.imported_from is not None,
    }


def accepted_reason(summary: RunSummary) -> str:
    """Why there is no acceptance rate: never a bare dash."""
    if summary.proposer == "none":
        return "nothing drafted"
    if summary.not_speculating:
        return "not speculating: " + one_line(summary.not_speculating)
    return "nothing drafted yet"


def page_line(offset: int, shown: int, total: int, noun: str = "run") -> str:
    """``51–100 of 10,000 runs``, or what the emptiness means."""
    if not total:
        return f"No {noun} matches."
    return f"{offset + 1:,}–{offset + shown:,} of {total:,} {noun}{'s' if total != 1 else ''}"


def clamp_offset(offset: int, total: int) -> int:
    """The start of the page that ``offset`` lies on, moved back when the list became shorter."""
    if total <= 0:
        return 0
    last = (total - 1) // PAGE_SIZE * PAGE_SIZE
    return max(0, min(offset // PAGE_SIZE * PAGE_SIZE, last))


def export_name(ids: Sequence[str], suffix: str, now: datetime | None = None) -> str:
    """A file name that no run can influence except by its id: ``redline-r3f9-20250101-120000.json``."""
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S")
    what = re.sub(r"[^A-Za-z0-9_-]", "", ids[0])[:40] if len(ids) == 1 else f"{len(ids)}-runs"
    return f"redline-{what}-{stamp}.{suffix}"


def one_line(text: str, limit: int = 200) -> str:
    """Text on one line, shortened."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + "…"


def percent(rate: float | None) -> str | None:
    """``33 %``."""
    return None if rate is None else f"{100 * rate:.0f} %"


def _number(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def _choice(value: Any) -> str | None:
    return value if isinstance(value, str) and value != ANY else None


def _day(value: Any, name: str) -> datetime | None:
    """The beginning of a day where this server stands, as the command line reads dates too."""
    text = str(value or "").strip()
    if not text:
        return None
    try:
        return datetime.combine(date.fromisoformat(text), time.min).astimezone()
    except (ValueError, OverflowError, OSError):
        raise RedlineError(f"the date in “{name}” is not one: write it like 2025-12-31") from None


def _next_day(day: datetime) -> datetime | None:
    """Midnight after ``day``, which may be 23 or 25 hours away; None behind the last day that there is."""
    try:
        return datetime.combine(day.date() + timedelta(days=1), time.min).astimezone()
    except (ValueError, OverflowError, OSError):
        return None


def zone(now: datetime | None = None) -> str:
    """The zone of the filter's days: ``UTC`` or ``UTC+02:00``, as it is now."""
    offset = (now or datetime.now()).astimezone().strftime("%z")
    return "UTC" if offset == "+0000" else f"UTC{offset[:3]}:{offset[3:5]}"
