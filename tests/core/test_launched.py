"""What launchers say of a process in its environment, the innermost one first."""

import pytest

from hpcdp.core.environment import RANKS, is_launched, launched_rank, launched_ranks, speaks


@pytest.mark.mpi
def test_rank_and_size_are_read_from_the_environment() -> None:
    from mpi4py import MPI

    assert (launched_rank(), launched_ranks()) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, None),
        ({"SLURM_STEP_NUM_TASKS": "1"}, None),  # the shell of `srun --pty bash`
        ({"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1"}, None),  # the same with --mpi=pmi2
        ({"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"}, 1),  # hydra's there
        ({"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "1"}, 1),
        ({"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "3"}, 3),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "4"}, 2),  # mpirun in an sbatch job
        ({"PMI_SIZE": "3"}, 3),
    ],
)
def test_the_innermost_launcher_says_how_many_ranks(environ, ranks):
    assert launched_ranks(environ) == ranks


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0"}, None),  # a batch script before any srun
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "PMIX_RANK": "2"}, 2),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "0"}, 1),
        ({"PMI_SIZE": "3", "PMI_RANK": "2", "PMIX_RANK": "0", "SLURM_PROCID": "0"}, 2),  # hydra in srun --mpi=pmix
    ],
)
def test_the_innermost_launcher_says_which_rank(environ, rank):
    assert launched_rank(environ) == rank


def test_rank_0_and_who_is_no_rank_speak():
    assert speaks({})
    for name in RANKS:
        assert speaks({name: "0"}) and not speaks({name: "1"})
    assert not speaks({"PMI_RANK": "1", "PMIX_RANK": "0"})


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "SLURM_STEP_ID"])
def test_any_launcher_counts_be_it_for_one_process(name):
    assert is_launched({name: "1"}) and not is_launched({})
