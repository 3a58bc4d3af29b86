"""Tables of RESULTS.md."""

from __future__ import annotations

from collections.abc import Iterable

from .verdicts import Verdict


def table(heading: list[str], rows: Iterable[list[str]]) -> str:
    """Its lines, each with a line's end."""
    lines = ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def of_targets(verdicts: Iterable[Verdict]) -> str:
    """One line for each."""
    rows = []
    for each in verdicts:
        verdict = "-" if each.measured is None else "met" if each.met else "**missed**"
        rows.append([each.target, each.what, each.wanted, each.measured or "not measured", verdict])
    return table(["", "what", "target", "measured", ""], rows)
