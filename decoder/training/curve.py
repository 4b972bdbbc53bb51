"""The learning curve as a picture: curve.jsonl -> SVG, readable on light and dark ground."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 320, 56, 16, 28, 44


def read_curve(path: Path) -> list[dict[str, Any]]:
    """Points of ``curve.jsonl``; after a resume the later of two points of one step counts."""
    points: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        point = json.loads(line)
        points[point["step"]] = point
    return [points[step] for step in sorted(points)]


def curve_svg(points: Sequence[dict[str, Any]], key: str, title: str) -> str:
    """One line: ``key`` over the tokens seen. The axis begins at the smallest value, as its marks say."""
    xs = [float(point["tokens"]) for point in points]
    ys = [float(point[key]) for point in points]
    low, high = min(ys), max(ys)
    span = (high - low) or 1.0
    far = max(xs) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        right = LEFT + (WIDTH - LEFT - RIGHT) * x / far
        return right, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / span

    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(x, y) for x, y in zip(xs, ys, strict=True)))
    marks = []
    for part in range(5):
        value, count = low + span * part / 4, far * part / 4
        across, _ = place(count, low)
        _, up = place(0, value)
        marks.append(f'<path d="M{LEFT} {up:.1f}H{WIDTH - RIGHT}" stroke="#888" stroke-opacity=".3"/>')
        marks.append(f'<text x="{LEFT - 8}" y="{up + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        marks.append(
            f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{count / 1e6:.1f} M</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
        f'<g font-family="sans-serif" font-size="12" fill="#777"><text x="{LEFT}" y="16">{title}</text>{"".join(marks)}'
        f'<text x="{(WIDTH + LEFT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">tokens trained on</text></g>'
        f'<polyline points="{line}" fill="none" stroke="#c2410c" stroke-width="2"/></svg>\n'
    )
