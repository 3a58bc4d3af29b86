"""Of the ends of a job's ranks the one that made mpirun end the others is found."""

import pytest

from hpcdp.launch.mpirun_stderr import first_failure
from hpcdp.launch.process_monitor import End


def ends_of(*ends: tuple[int, int | None, float]) -> list[End]:
    return [End(rank, 100 + rank, status, at_s) for rank, status, at_s in ends]


@pytest.mark.parametrize(
    ("ends", "code", "rank"),
    [
        ([(0, 0, 1.0), (1, 0, 1.0)], 0, None),
        ([(0, 9, 1.0), (1, 9, 1.0)], 137, 0),
        ([(1, 9, 1.0), (0, 15, 1.2)], 9, 1),
        ([(1, 9, 1.0), (0, 9, 1.0)], 7, None),  # MPI_Abort(7)
        ([(2, 3 << 8, 1.0), (1, 9, 1.0), (0, 9, 1.0)], 9, 2),
        ([(2, 0, 1.0), (1, 9, 1.1), (0, 9, 1.1)], 0, 2),  # left without MPI_Finalize
        ([(2, 0, 1.0), (1, 15, 1.3), (0, 15, 1.3)], 1, 2),
        ([(2, 0, 1.0), (1, 9, 60.0), (0, 15, 60.1)], 9, 1),  # long after a proper end
        ([(0, 9, 1.0), (2, 0, 1.002), (1, 9, 1.01)], 0, 2),  # killed before the one that left was seen to end
        ([(0, 9, 1.0), (2, 3 << 8, 1.002), (1, 9, 1.01)], 9, 2),
        ([(0, 9, 1.0), (2, 11, 1.002), (1, 9, 1.01)], 9, 2),
        ([(2, 11, 1.0), (1, 9, 1.01), (0, 9, 1.01)], 9, 2),
        ([(2, 11, 1.0), (1, 1 << 8, 1.3), (0, 15, 1.3)], 1, 1),  # crashed in MPI_Finalize when rank 1 aborted the job
        ([(2, 11, 1.0), (1, 1 << 8, 1.3), (0, 15, 1.3)], 139, 2),
        ([(1, 9, 1.0), (0, 143 << 8, 1.3)], 137, 1),  # took mpirun's SIGTERM and ended itself
        ([(2, None, 1.0), (1, 9, 1.0)], 9, 2),  # on a kernel that does not keep the status
        ([(0, None, 1.0), (1, 9 << 8, 1.1)], 9, 1),
        ([(0, None, 1.0), (1, 9 << 8, 1.1)], 7, 0),
        ([(2, 0, 1.0), (1, 9, 1.0), (0, 9, 1.0)], 255, 2),  # Intel MPI's mpirun
        ([], 1, None),
    ],
)
def test_who_failed_first(ends: list[tuple[int, int | None, float]], code: int, rank: int | None) -> None:
    first = first_failure(ends_of(*ends), code)
    assert (first and first.rank) == rank


@pytest.mark.parametrize(
    ("ends", "code", "rank"),
    [
        ([(2, 9, 1.0), (0, 11, 1.001), (3, 9, 1.02), (1, 9, 1.03)], 9, 2),
        ([(2, 15, 1.0), (0, 11, 1.161), (3, 9, 1.17), (1, 9, 1.24)], 15, 2),
        ([(2, 9, 1.0), (0, 11, 1.001), (3, 9, 1.02), (1, 9, 1.03)], 11, 0),
        ([(0, 11, 1.0), (2, 9, 1.1), (3, 9, 1.1), (1, 9, 1.1)], 11, 0),
        ([(2, 9, 1.0), (0, 3 << 8, 1.001), (3, 9, 1.02), (1, 9, 1.03)], 9, 0),
    ],
)
def test_ranks_of_mpich_may_crash_when_one_of_another_host_has_gone(
    ends: list[tuple[int, int | None, float]], code: int, rank: int
) -> None:
    first = first_failure([end._replace(host="b" if end.rank > 1 else "a") for end in ends_of(*ends)], code)
    assert first is not None and first.rank == rank


@pytest.mark.parametrize(("host", "rank"), [("b", 3), ("a", 1)])
def test_a_rank_that_ends_by_sigterm_is_not_one_that_mpich_has_killed(host: str, rank: int) -> None:
    first, other = ends_of((1, 9, 1.0), (3, 15, 1.1))  # what other hosts tell comes later
    found = first_failure([first._replace(host="a"), other._replace(host=host)], 137)
    assert found is not None and found.rank == rank


@pytest.mark.parametrize(
    ("ends", "rank"),
    [
        ([(1, 14 << 8, 1.0), (2, 9, 1.01), (0, 15, 1.3)], 2),  # its socket has closed before it was seen to end
        ([(2, 9, 1.0), (1, 14 << 8, 1.01), (0, 15, 1.3)], 2),
        ([(1, 14 << 8, 1.0), (0, 14 << 8, 1.01), (2, 3 << 8, 1.02)], 2),
        ([(1, 14 << 8, 1.0), (0, 15, 1.3), (2, 15, 1.3)], 1),  # it is the program's own
        ([(1, 14 << 8, 1.0)], 1),
        ([(2, 0, 1.0), (1, 14 << 8, 1.01), (0, 15, 1.1)], 2),  # without MPI_Finalize, and mpirun's kill seen early
        ([(2, 0, 1.0), (1, 14 << 8, 1.01), (0, 15, 1.3)], 2),
        ([(0, 14 << 8, 1.0), (1, 15, 1.005), (3, 9, 1.006), (2, 15, 1.27)], 3),
        ([(0, 14 << 8, 1.0), (1, 15, 1.003), (3, 0, 1.007), (2, 15, 1.26)], 3),
        ([(1, 14 << 8, 1.0), (0, 15, 1.004), (3, 15, 1.005), (2, 15, 1.26)], 3),  # of another host than rank 1
    ],
)
def test_who_failed_first_of_ranks_that_leave_when_another_has_gone(
    ends: list[tuple[int, int | None, float]], rank: int
) -> None:
    on_hosts = [end._replace(host="b" if end.rank > 1 else "a") for end in ends_of(*ends)]
    first = first_failure(on_hosts, 14, bereft=14)
    assert first is not None and first.rank == rank


@pytest.mark.parametrize(
    ("ends", "code", "rank"),
    [
        ([(1, 130 << 8, 1.0), (3, 9, 1.04), (0, 9, 1.05), (2, 9, 1.3)], 130, 3),  # that host was heard later
        ([(1, 130 << 8, 1.0), (0, 143 << 8, 1.0), (3, 9, 1.4)], 143, 3),
        ([(3, 9, 1.0), (1, 130 << 8, 1.01), (0, 130 << 8, 1.01)], 130, 3),
        ([(1, 15, 1.0), (2, 9, 1.2), (3, 3 << 8, 1.3)], 1, 3),
        ([(1, 130 << 8, 1.0), (0, 9, 1.3), (2, 130 << 8, 1.3)], 130, 1),  # somebody has told it
        ([(3, 9, 1.0), (1, 130 << 8, 1.49), (2, 14 << 8, 1.51), (0, 9, 1.52)], 137, 3),
    ],
)
def test_who_failed_first_of_ranks_that_end_when_mpirun_tells_them(
    ends: list[tuple[int, int | None, float]], code: int, rank: int
) -> None:
    on_hosts = [end._replace(host="b" if end.rank > 1 else "a") for end in ends_of(*ends)]
    first = first_failure(on_hosts, code, bereft=14)
    assert first is not None and first.rank == rank
