"""Redline's entry point: ``python app.py`` serves the playground."""

from __future__ import annotations

from playground.command_line import main

if __name__ == "__main__":
    main()
