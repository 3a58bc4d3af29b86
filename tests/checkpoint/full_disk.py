"""A disk that is full, without one."""

import contextlib
import resource


@contextlib.contextmanager
def files_of_at_most(nbytes):
    """The kernel refuses what would make a file of this process longer, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
