"""What the child process of `core.hdf5` runs: for each line, a list in JSON, it visits a file, and answers by
a byte.

It ends when its input ends, and by SIGPROF where a visit takes more processor time than it may.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Sequence

import h5py  # type: ignore[import-untyped]

from .hdf5 import outside, special_file

_MOST_CHUNKS = 100_000
_WHOLE_NBYTES = 4 << 20
"""Data sets of so many bytes are read whole, of others the first and the last element."""


def visit(path: str, names: Sequence[str], external: bool) -> None:
    """Do with a file what its readers will."""
    with h5py.File(path, "r", locking=False) as file:
        look = special_file if external else outside
        found = [file.get(name) for name in names if look(file, name) is None]
        if not all(isinstance(each, h5py.Dataset) for each in found):
            file.visititems(lambda _name, _object: None)
        for each in found:
            if isinstance(each, h5py.Dataset):
                with contextlib.suppress(Exception):
                    _read(each)


def _read(dataset: h5py.Dataset) -> None:
    str(dataset.dtype), dataset.attrs.get("dtype")
    if dataset.chunks is not None:
        left = iter(range(_MOST_CHUNKS))
        dataset.id.chunk_iter(lambda _chunk: None if next(left, None) is not None else True)
    if math.prod(dataset.shape) * dataset.dtype.itemsize <= _WHOLE_NBYTES:
        dataset[()]
    else:
        for last in (False, True):
            dataset[tuple(length - 1 if last else 0 for length in dataset.shape)]


def main() -> None:
    """Visit one file after the other."""
    answers = int(sys.argv[1])
    os.chdir("/")  # where it was started may be taken away
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that this one serves
    for line in sys.stdin.buffer:
        path, names, external, limit_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        with contextlib.suppress(Exception):  # which readers will meet themselves, and tell
            visit(path, names, external)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(answers, b".")


if __name__ == "__main__":
    main()
