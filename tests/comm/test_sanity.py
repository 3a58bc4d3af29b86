import pytest

from hpcdp.comm.startup import check_singleton_world, warn_of_few_descriptors, warn_of_foreign_launcher
from hpcdp.errors import LaunchError

MPIRUN_2 = {"OMPI_COMM_WORLD_SIZE": "2"}
HYDRA_2 = {"PMI_SIZE": "2"}


@pytest.mark.parametrize(
    ("library", "environ", "remedy"),
    [
        ("MPICH", MPIRUN_2, "use the mpirun of MPICH"),
        ("Open MPI", HYDRA_2, "use the mpirun of Open MPI"),
        ("Open MPI", MPIRUN_2, "the mpirun installed with the library"),
        ("Open MPI", {"SLURM_STEP_NUM_TASKS": "4"}, "srun --mpi=pmix"),
        ("MPICH", {"SLURM_STEP_NUM_TASKS": "4"}, "srun --mpi=pmi2"),
        ("Intel MPI", {"SLURM_STEP_NUM_TASKS": "4"}, "srun --mpi=list"),
        ("Open MPI", {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4"}, "hpcdp launch -n 4 -- python SCRIPT"),
    ],
)
def test_separate_worlds_of_one_are_refused_with_the_remedy(library, environ, remedy):
    with pytest.raises(LaunchError) as caught:
        check_singleton_world(library, 1, environ)
    assert remedy in str(caught.value)
    assert f"separate worlds of one under {library}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("library", "size", "environ"),
    [
        ("Open MPI", 1, {}),
        ("Open MPI", 1, {"OMPI_COMM_WORLD_SIZE": "1"}),
        ("Open MPI", 2, MPIRUN_2),
        ("Open MPI", 1, {"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4"}),  # mpirun in an sbatch job
        ("MPICH", 1, {"PMI_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "2"}),  # hydra started by a rank of Open MPI
        ("Open MPI", 1, {"SLURM_NTASKS": "8"}),  # a batch script before any srun
        ("Open MPI", 1, {"OMPI_COMM_WORLD_SIZE": "many"}),
        ("Open MPI", 1, {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1"}),
        ("Open MPI", 1, {"WORLD_SIZE": "4"}),  # of some other program
        ("Open MPI", 2, MPIRUN_2 | {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4"}),
    ],
)
def test_good_jobs_are_not_refused(library, size, environ):
    check_singleton_world(library, size, environ)


def test_mpich_under_open_mpi_is_told_on_rank_0_before_it_starts(capfd):
    foreign = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    warn_of_foreign_launcher("MPICH", foreign)
    assert "use the mpirun of MPICH" in capfd.readouterr().err
    for library, environ in [
        ("MPICH", foreign | {"OMPI_COMM_WORLD_RANK": "1"}),
        ("MPICH", foreign | {"PMI_SIZE": "2"}),
        ("MPICH", {"PMI_SIZE": "2"}),
        ("Open MPI", foreign),
    ]:
        warn_of_foreign_launcher(library, environ)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("ranks", "limit", "says"), [(8, 23, True), (8, 24, False), (32, 40, False), (1024, 40, False)]
)
def test_few_descriptors_are_told_of(ranks, limit, says, capsys):
    warn_of_few_descriptors(ranks, limit)
    assert capsys.readouterr().err.startswith(f"hpcdp: this rank may open {limit} files") is says
