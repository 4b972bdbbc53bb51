"""Which drafts can be offered for a target, and why the others cannot."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from decoder import catalog
from decoder.errors import RedlineError

log = logging.getLogger(__name__)


def misfit(target: str, draft: str) -> str | None:
    """The first reason why ``draft`` does not fit ``target``, None when it fits. Loads tokenizers and configs only.

    Only a verdict is remembered. What could not be read (no network, a file that is still being downloaded) may be
    readable at the next try.
    """
    try:
        return _verdict(target, draft)
    except RedlineError as error:
        return str(error)
    except Exception as error:
        log.exception("checking %s against %s failed", draft, target)
        return f"it could not be read ({type(error).__name__})"


@functools.lru_cache(maxsize=256)
def _verdict(target: str, draft: str) -> str | None:
    from decoder.compat import check_pair

    reasons = check_pair(target, draft)
    return reasons[0] if reasons else None


def is_here(target: str) -> bool:
    """True when ``target`` can be read without a network."""
    entry = catalog.find(target)
    return entry.present if entry is not None else Path(target).expanduser().exists()


def draft_choices(
    target: str, chosen: str | None = None, *, check: bool = False, proposer: str = "draft-model"
) -> tuple[list[tuple[str, str]], str]:
    """Drafts of ``proposer`` to offer for ``target`` as label and name, and a line on those that are not offered.

    Without ``check`` only drafts that were made for the target are offered, which needs no file to be read. With it
    every draft that is here is checked against the target, and one that does not fit is named with the reason; a
    target that would have to be downloaded first is not asked, the run itself will say what does not fit.
    """
    check = check and is_here(target)
    offered: list[tuple[str, str]] = []
    left_out: list[str] = []
    for entry in catalog.drafts_for(proposer):
        label = f"{entry.name} ({entry.size_mb:,} MB)"
        if not entry.present:
            if entry.fits == target:
                offered.append((f"{entry.name} (download, {entry.size_mb:,} MB)", entry.name))
            continue
        if not check:
            if entry.fits == target:
                offered.append((label, entry.name))
            continue
        reason = misfit(target, entry.name)
        if reason is None:
            offered.append((label, entry.name))
        else:
            left_out.append(f"{entry.name}: {reason}")
    names = [name for _, name in offered]
    if chosen and chosen not in names:
        offered.append((chosen, chosen))
    return offered, ("Not offered, because it does not fit: " + "; ".join(left_out) + ".") if left_out else ""
