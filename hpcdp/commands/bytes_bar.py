"""How many bytes of long work are done: a bar on a terminal, a line every ten seconds in a log; on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from ..errors import to_stderr
from ..train.progress import terminal_columns
from .texts import size

_REFRESH_S = 0.1
_LOG_EVERY_S = 10.0


class BytesBar:
    """Shows progress inside a ``with`` statement; nothing stays of the bar.

    Args:
        what: is being done.
        total: bytes in all.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._shown = time.monotonic()
        self._bars: Any = None

    def __enter__(self) -> BytesBar:
        columns = terminal_columns(sys.stderr)
        if columns:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
            from rich.table import Column

            console = Console(file=sys.stderr, width=columns - 1, force_terminal=True, highlight=False)
            cut_off = Column(no_wrap=True, overflow="crop")  # not every terminal has rich's ellipsis
            # Refreshed by hand: rich's own refresh is a thread.
            self._bars = Progress(
                TextColumn("{task.description}", markup=False, table_column=cut_off), BarColumn(),
                DownloadColumn(table_column=cut_off), TimeRemainingColumn(table_column=cut_off),
                console=console, auto_refresh=False, transient=True,
            )  # fmt: skip
            self._task = self._bars.add_task(self._what, total=self._total)
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def tell(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self._done += nbytes
        now = time.monotonic()
        if now - self._shown < (_LOG_EVERY_S if self._bars is None else _REFRESH_S):
            return
        self._shown = now
        if self._bars is None:
            to_stderr(f"{self._what}: {size(self._done)} of {size(self._total)}")
        else:
            self._bars.update(self._task, completed=self._done)
            self._bars.refresh()
