"""What `hpcdp checkpoint ls` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from ..checkpoint.overview import Overview, Seen
from . import texts


def lines(seen: Overview) -> Iterator[str]:
    """A line a checkpoint, and what else is to be said of a folder."""
    rows = [_row(each) for each in seen.checkpoints]
    if rows:
        *made, _ = texts.table(("step", "written", "size", "ranks", "state"), [*rows, ("", "", "", "", "complete")],
                               (0, 2, 3))  # fmt: skip
        yield f"{made[0]}{' ' * (len('complete') - len('state'))}  metrics"
        for line, each in zip(made[1:], seen.checkpoints, strict=True):
            yield from _with_metrics(line, each)
    else:
        yield f"{seen.path}: no complete checkpoint"
    for path, nbytes in seen.left_over.items():
        what = "being written, or left over" if seen.writer else "left over, the next save removes it"
        yield f"{path.name}  {texts.size(nbytes)}, {what}"
    if seen.writer:
        yield f"saving here: {seen.writer}"


def _row(each: Seen) -> tuple[str, ...]:
    found, state = each.manifest, "damaged" if each.damage else "complete"
    if found is None:
        return f"{each.step}", "", texts.size(each.nbytes), "", state
    return (
        f"{each.step}", texts.local_time(found.written), texts.size(each.nbytes), str(found.world.get("size", "?")),
        state,
    )  # fmt: skip


def _with_metrics(line: str, each: Seen) -> Iterator[str]:
    told = texts.numbers(each.manifest.metrics) if each.manifest is not None else ""
    if len(line) + 2 + len(told) <= texts.columns():
        yield f"{line}  {told}".rstrip()
        told = ""
    else:
        yield line
    for more in (told, each.damage or ""):
        yield from textwrap.wrap(more, texts.columns(), initial_indent="    ", subsequent_indent="    ",
                                 break_on_hyphens=False)  # fmt: skip


def as_json(seen: Overview) -> dict[str, Any]:
    """The same for programs: sizes in bytes, ``damage`` null where nothing is seen to be wrong."""
    return {
        "path": str(seen.path),
        "checkpoints": [
            {
                "step": each.step, "path": str(each.path), "nbytes": each.nbytes, "damage": each.damage,
                "written": each.manifest.written if each.manifest else None,
                "world": each.manifest.world if each.manifest else None,
                "metrics": each.manifest.metrics if each.manifest else {},
            }
            for each in seen.checkpoints
        ],
        "left_over": [{"path": str(path), "nbytes": nbytes} for path, nbytes in seen.left_over.items()],
        "writer": seen.writer,
    }  # fmt: skip
