"""How every command line of Redline behaves: bad input ends with code 2 and one line on stderr, never a traceback.

Imports neither torch nor any other room; ``python -m decoder``, ``python -m storage`` and ``python app.py`` share it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from decoder.errors import RedlineError

_LIMIT = 1000


def run_typer(application: typer.Typer, arguments: Sequence[str] | None, program: str) -> int:
    """Run a Typer application on ``arguments`` (None: ``sys.argv``); returns the exit code."""
    try:
        code = application(arguments, standalone_mode=False, prog_name=program)
    except typer.Exit as end:
        return end.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # The reader went away (head, less): nothing is wrong, and nothing more can be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except typer.TyperException as error:
        sentence = error.format_message() if hasattr(error, "format_message") else str(error)
        return complain(f"{sentence.rstrip('.')} (see {program} --help)")
    except RedlineError as error:
        return complain(str(error))
    return code if isinstance(code, int) else 0


def complain(sentence: str) -> int:
    """One line on stderr, whatever characters it holds and whatever the locale says; returns exit code 2."""
    folded = " ".join(sentence.split())
    # Names and paths may hold control or bidirectional characters: they are shown, not obeyed.
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in folded)
    line = line if len(line) <= _LIMIT else line[:_LIMIT] + "…"
    data = f"error: {line}\n".encode("utf-8", "backslashreplace")
    buffer = getattr(sys.stderr, "buffer", None)
    if buffer is None:
        sys.stderr.write(data.decode())
    else:
        buffer.write(data)
        buffer.flush()
    return 2
