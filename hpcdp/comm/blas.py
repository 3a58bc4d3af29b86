"""BLAS threads: as many a rank as it has cores, where ranks of a machine share them."""

from __future__ import annotations

import os

from ..launched import THREAD_VARIABLES


def share_cores(ranks: int, cores: int) -> None:
    """Give this rank's BLAS its share of ``cores``, on which ``ranks`` ranks compute; numbers only become smaller.

    What the user has set wins, as does what launchers set: a variable, or that a rank is bound to cores of its own.
    """
    share = max(1, cores // ranks)
    if len(os.sched_getaffinity(0)) <= share or any(name in os.environ for name in THREAD_VARIABLES):
        return
    from threadpoolctl import ThreadpoolController  # 10 ms, which most jobs need not spend

    for library in ThreadpoolController().select(user_api="blas").lib_controllers:
        if library.num_threads > share:
            library.set_num_threads(share)
