"""Draws plots as inline SVG. Knows values and pixels; knows no measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from graft.bench.report.page import Bars, Lines

_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 48
_BAR_HEIGHT, _BAR_GAP, _NAME_WIDTH = 22, 10, 220
_COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#64748b", "#be185d")
_NUM_TICKS = 5


def draw(plot: Lines | Bars) -> str:
    """One svg element."""
    return _lines(plot) if isinstance(plot, Lines) else _bars(plot)


def standalone(plot: Lines | Bars) -> str:
    """A whole SVG file, readable on light and dark pages, that says in words what it shows."""
    style = (
        "<style>text{font:12px system-ui,sans-serif;fill:#475569}"
        ".rule{stroke:#94a3b8;stroke-opacity:.4}"
        "@media (prefers-color-scheme: dark){text{fill:#cbd5e1}}</style>"
    )
    words = f"<title>{escape(plot.title)}</title><desc>{escape(_told(plot))}</desc>"
    head, rest = draw(plot).split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg">{words}{style}{rest}\n'


def _told(plot: Lines | Bars) -> str:
    """The last value of each curve, or the sum of each bar."""
    if isinstance(plot, Lines):
        ends = {name: curve[-1] for name, curve in plot.curves.items() if curve}
        told = [
            f"{name} ends at {y:.4g} where {plot.x_label} is {x:.4g}"
            for name, (x, y) in ends.items()
        ]
        return f"{plot.y_label} by {plot.x_label}: {'; '.join(told)}."
    told = [f"{name} {sum(parts.values()):.4g}" for name, parts in plot.bars.items()]
    return f"{plot.unit}: {'; '.join(told)}."


def ticks(most: float) -> list[float]:
    """Round values from 0 to the first one that is not below `most`."""
    if most <= 0 or not math.isfinite(most):
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(most / _NUM_TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if most / (step * factor) <= _NUM_TICKS)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def _lines(plot: Lines) -> str:
    points = [point for curve in plot.curves.values() for point in curve]
    across = ticks(max((x for x, _ in points), default=1.0))
    up = ticks(max((y for _, y in points), default=1.0))

    def at(x: float, y: float) -> tuple[float, float]:
        wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + wide * x / across[-1], _TOP + high * (1 - y / up[-1])

    parts = []
    for y in up:
        left, height = at(0, y)
        parts.append(_rule(left, height, _WIDTH - _RIGHT, height))
        parts.append(_text(left - 6, height + 4, _shown(y), "end"))
    for x in across:
        place, floor = at(x, 0)
        parts.append(_text(place, floor + 16, _shown(x), "middle"))
    parts.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 14, plot.x_label, "middle"))
    parts.append(
        f'<text transform="translate(14 {_HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(plot.y_label)}</text>"
    )
    for number, (name, curve) in enumerate(plot.curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [at(x, y) for x, y in curve]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), (cx, cy) in zip(curve, places, strict=True):
            parts.append(
                f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3" fill="{colour}">'
                f"<title>{escape(name)}: {_shown(x)}, {_shown(y)}</title></circle>"
            )
    return _svg(plot.title, _HEIGHT, parts, list(plot.curves))


def _bars(plot: Bars) -> str:
    most = max((sum(parts.values()) for parts in plot.bars.values()), default=1.0) or 1.0
    names = list(dict.fromkeys(name for parts in plot.bars.values() for name in parts))
    drawn = []
    for line, (name, parts) in enumerate(plot.bars.items()):
        top = _TOP + line * (_BAR_HEIGHT + _BAR_GAP)
        drawn.append(_text(_NAME_WIDTH - 8, top + _BAR_HEIGHT * 0.7, name, "end"))
        left = float(_NAME_WIDTH)
        for part, value in parts.items():
            width = (_WIDTH - _NAME_WIDTH - 90) * value / most
            colour = _COLOURS[names.index(part) % len(_COLOURS)]
            drawn.append(
                f'<rect x="{left:.1f}" y="{top}" width="{max(width, 0):.1f}" '
                f'height="{_BAR_HEIGHT}" fill="{colour}">'
                f"<title>{escape(part)}: {_shown(value)} {escape(plot.unit)}</title></rect>"
            )
            left += width
        total = f"{_shown(sum(parts.values()))} {plot.unit}"
        drawn.append(_text(left + 6, top + _BAR_HEIGHT * 0.7, total, "start"))
    height = 2 * _TOP + len(plot.bars) * (_BAR_HEIGHT + _BAR_GAP)
    return _svg(plot.title, height, drawn, names if len(names) > 1 else [])


def _svg(title: str, height: float, parts: Sequence[str], names: Sequence[str]) -> str:
    legend = []
    for number, name in enumerate(names):
        top = height + 4 + 18 * number
        colour = _COLOURS[number % len(_COLOURS)]
        legend.append(f'<rect x="{_LEFT}" y="{top}" width="12" height="12" fill="{colour}"/>')
        legend.append(_text(_LEFT + 18, top + 10, name, "start"))
    whole = height + 18 * len(names) + 8
    return (
        f'<svg viewBox="0 0 {_WIDTH} {whole:.0f}" role="img" aria-label="{escape(title)}">'
        f"{''.join([*parts, *legend])}</svg>"
    )


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="rule"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _shown(value: float) -> str:
    return f"{value:.4g}"
