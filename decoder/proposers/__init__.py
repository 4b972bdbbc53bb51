"""Proposers by name. A new one is a new file and one line in ``build``."""

from __future__ import annotations

from decoder.proposers.base import Context, Proposal, Proposer, Row

__all__ = ["Context", "Proposal", "Proposer", "Row"]
