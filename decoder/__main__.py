"""``python -m decoder``: run, models, audit, bench, train. Bad input ends with code 2 and one line on stderr."""

from __future__ import annotations

from decoder.cli import main

if __name__ == "__main__":
    main()
