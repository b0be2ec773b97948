"""Pictures for the site: flow charts in Mermaid's notation as SVG, so that no script and no program is needed.

Nodes stand in rows: each below all that point to it. An arrow that passes rows has a place in each of them. Within a
row, what is connected stands close together: a few passes order it by the places of its neighbours (Sugiyama, Tagawa,
Toda 1981).
"""

from __future__ import annotations

import re
from html import escape
from itertools import pairwise

_LINE, _ROW, _BOX, _LETTER = 24, 70, 30, 7.5
_STYLE = 'fill="none" stroke="currentColor"'


def of_fence(fence: str) -> str:
    """Return a fenced block as it is, or as a picture if it holds a flow chart in Mermaid's notation."""
    if not fence.startswith("```mermaid\nflowchart TB"):
        return fence
    names = dict(re.findall(r'^ *(\w+)\["(.*)"\]$', fence, flags=re.MULTILINE))
    return svg(names, re.findall(r"^ *(\w+) --> (\w+)$", fence, flags=re.MULTILINE))


def svg(names: dict[str, str], edges: list[tuple[str, str]]) -> str:
    """Return a picture of a graph without circles.

    Args:
        names: The text of each node.
        edges: Pairs of nodes: the first one uses the second one.
    """
    rows, paths = _rows([*names], edges)
    widths = [sum(_width(names, node) for node in row) for row in rows]
    across: dict[str, float] = {}
    for row, width in zip(rows, widths, strict=True):
        at = (max(widths) - width) / 2
        for node in row:
            across[node] = at + _width(names, node) / 2
            at += _width(names, node)
    down = {node: number * _ROW for number, row in enumerate(rows) for node in row}
    parts = [f'<path d="{_path(path, names, across, down)}" {_STYLE} marker-end="url(#arrow)"/>' for path in paths]
    for node, name in names.items():
        box, x, y = _width(names, node) - _LINE / 2, across[node], down[node]
        parts.append(f'<rect x="{x - box / 2:.0f}" y="{y}" width="{box:.0f}" height="{_BOX}" rx="4" {_STYLE}/>')
        parts.append(f'<text x="{x:.0f}" y="{y + 20}" text-anchor="middle">{escape(name)}</text>')
    uses = "; ".join(f"{names[a]} uses {', '.join(names[d] for c, d in edges if c == a)}" for a in dict(edges))
    total = f"{max(widths) + 2:.0f}"
    head = f'<svg viewBox="-1 -1 {total} {len(rows) * _ROW}" width="{total}" style="max-width: 100%" role="img" '
    head += f'aria-label="{escape(uses)}" font-size="13" fill="currentColor">'
    arrow = '<marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    return "\n".join([head, f'{arrow}<path d="M0 0 8 4 0 8z"/></marker>', *parts, "</svg>"])


def _rows(nodes: list[str], edges: list[tuple[str, str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the rows of a picture from above, and the nodes and places by which each edge passes."""
    level = dict.fromkeys(nodes, 0)
    for _ in nodes:
        for above, below in edges:
            level[below] = max(level[below], level[above] + 1)
    rows: list[list[str]] = [[] for _ in range(max(level.values()) + 1)]
    for node in nodes:
        rows[level[node]].append(node)
    paths = []
    for above, below in edges:
        places = [f"{above} {below} {number}" for number in range(level[above] + 1, level[below])]
        for number, place in enumerate(places, level[above] + 1):
            rows[number].append(place)
        paths.append([above, *places, below])
    steps = [step for path in paths for step in pairwise(path)]
    for turn in range(8):
        upwards = turn % 2
        for row, other in pairwise(rows[::-1] if upwards else rows):
            at = {node: number / len(row) for number, node in enumerate(row)}
            near = {
                node: [at[a] for a, b in (step[::-1] if upwards else step for step in steps) if b == node]
                for node in other
            }
            other.sort(key=lambda node: sum(near[node]) / len(near[node]) if near[node] else 0.5)
    return rows, paths


def _width(names: dict[str, str], node: str) -> float:
    return len(names[node]) * _LETTER + 2 * _LINE if node in names else _LINE


def _path(path: list[str], names: dict[str, str], across: dict[str, float], down: dict[str, int]) -> str:
    points = [(across[path[0]], down[path[0]] + _BOX)]
    for node in path[1:]:
        points.append((across[node], down[node]))
        if node not in names:
            points.append((across[node], down[node] + _BOX))
    return "M" + " ".join(f"{x:.0f} {y}" for x, y in points)
