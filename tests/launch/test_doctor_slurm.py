"""Each mismatch of Slurm and MPI is told from the others; real steps are tests/cluster's."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcdp.cli import doctor
from hpcdp.cli.doctor import Verdict
from hpcdp.errors import LaunchError
from hpcdp.launch import mpi_library
from hpcdp.launch.launchers import slurm
from hpcdp.launch.mpi_library import MpiLibrary

LIBRARY = "/x/lib/libmpi.so.40"
ALONE = "expected one world of 2 ranks, as srun started (SLURM_STEP_NUM_TASKS), got 2 separate worlds of one"
Answer = Callable[..., tuple[int, str]]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    """The shell of a job on two nodes, under Open MPI, whose commands answer as a function says."""
    for name in ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_MPI_TYPE", "SLURM_EXPORT_ENV", "SBATCH_EXPORT"):
        monkeypatch.delenv(name, raising=False)
    for name, text in {"JOB_ID": "7", "JOB_NODELIST": "n[1-2]", "TASKS_PER_NODE": "1(x2)"}.items():
        monkeypatch.setenv(f"SLURM_{name}", text)
    monkeypatch.setattr(mpi_library, "find_library", lambda: MpiLibrary("openmpi", Path(LIBRARY)))
    monkeypatch.setattr(slurm, "mpi_types", lambda: ("none", "pmi2", "pmix"))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    return lambda answer: monkeypatch.setattr(doctor, "child", answer)


def test_nothing_is_wrong(job) -> None:
    def answer(command: list[str], begins: str = "") -> tuple[int, str]:
        text = " ".join(command)
        if "hpcdp.init" in text:
            return 0, "hello 2 1"
        if "memory_mib" in text:
            return 0, json.dumps(["n1", LIBRARY, 4000])
        return 0, "MpiDefault = pmix" if "MpiDefault" in text else "2000" if "sinfo" in text else "slurm 22.05"

    job(answer)
    assert {title: check().verdict for title, check in doctor.SLURM_CHECKS.items()} == dict.fromkeys(
        doctor.SLURM_CHECKS, Verdict.OK
    )


@pytest.mark.parametrize(
    ("answer", "saw", "remedy"),
    [
        ((1, f"init: {ALONE} under Open MPI"), "srun --mpi=pmix starts two worlds of one", "the site's MPI module"),
        ((0, "hello 1 1"), "two worlds of one", "or mpirun"),
        ((1, "srun: error: pmix plugin: dlopen of libpmix.so failed"), "libpmix.so failed", "for libpmix.so"),
        ((124, "nothing for 60 s: it hangs"), "it hangs", "see the other checks"),
    ],
)
def test_two_tasks_that_are_no_world(job, answer: tuple[int, str], saw: str, remedy: str) -> None:
    job(lambda command, begins="": answer)
    finding = doctor.check_two_tasks()
    assert finding.verdict is Verdict.FAILED
    assert saw in finding.saw and remedy in finding.remedy


def test_a_plugin_that_is_missing(job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "mpi_types", lambda: ("none", "pmi2"))
    finding = doctor.check_plugin()
    assert finding.verdict is Verdict.FAILED and "has none, pmi2, and Open MPI needs pmix" in finding.saw

    def silent() -> tuple[str, ...]:
        raise LaunchError("srun --mpi=list", got="no answer")

    monkeypatch.setattr(slurm, "mpi_types", silent)
    assert doctor.check_plugin().verdict is Verdict.FAILED


@pytest.mark.parametrize(
    ("said", "config", "verdict", "remedy"),
    [
        ("pmi2", "pmix", Verdict.FAILED, "export SLURM_MPI_TYPE=pmix"),
        ("pmix_v4", "none", Verdict.OK, ""),
        (None, "none", Verdict.WARNING, "srun --mpi=pmix, or export SLURM_MPI_TYPE=pmix"),
        (None, "(null)", Verdict.WARNING, "srun --mpi=pmix, or export SLURM_MPI_TYPE=pmix"),
        (None, "pmix", Verdict.OK, ""),
    ],
)
def test_what_a_plain_srun_takes(
    job, said: str | None, config: str, verdict: Verdict, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if said is not None:
        monkeypatch.setenv("SLURM_MPI_TYPE", said)
    job(lambda command, begins="": (0, f"MpiDefault              = {config}"))
    finding = doctor.check_default()
    assert (finding.verdict, finding.remedy) == (verdict, remedy)
    assert "(null)" not in finding.saw


@pytest.mark.parametrize(
    ("answer", "verdict", "saw"),
    [
        ((2, "execve(): /venv/bin/python: No such file or directory"), Verdict.FAILED, "n1: execve()"),
        ((0, json.dumps(["n2", "/usr/lib/libmpi.so.12", 4000])), Verdict.FAILED, "n2 loads /usr/lib/libmpi.so.12"),
        ((0, json.dumps(["n1", LIBRARY, 100])), Verdict.WARNING, "n1: 100 MiB of memory"),
        ((0, "a line of a prolog"), Verdict.FAILED, "a line of a prolog"),
    ],
)
def test_nodes_that_are_not_as_this_one(job, answer: tuple[int, str], verdict: Verdict, saw: str) -> None:
    job(lambda command, begins="": answer)
    finding = doctor.check_nodes()
    assert finding.verdict is verdict and saw in finding.saw and finding.remedy


def test_memory_that_nobody_has_configured(job) -> None:
    job(lambda command, begins="": (0, "1"))
    assert doctor.check_memory().verdict is Verdict.WARNING


def test_variables_that_do_not_travel(job, monkeypatch: pytest.MonkeyPatch) -> None:
    job(lambda command, begins="": (1, ""))
    assert "another environment" in doctor.check_export().saw
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    assert doctor.check_export().remedy == "srun --export=ALL"


def test_cores_that_srun_does_not_take(job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    assert doctor.check_job().remedy == "export SRUN_CPUS_PER_TASK=4"
    monkeypatch.setenv("SRUN_CPUS_PER_TASK", "4")
    assert doctor.check_job().verdict is Verdict.OK


def test_outside_of_a_job_it_says_how(job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    for check in (doctor.check_job, doctor.check_two_tasks, doctor.check_nodes):
        finding = check()
        assert finding.verdict is Verdict.WARNING and finding.remedy == "salloc --ntasks=2 hpcdp doctor --slurm"


def test_without_slurm(job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    finding = doctor.check_commands()
    assert finding.verdict is Verdict.FAILED and finding.saw.startswith("srun, sbatch, squeue")


def test_without_slurm_one_check_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert list(doctor.slurm_checks()) == ["Slurm"]
    assert doctor.slurm_checks()["Slurm"]().verdict == Verdict.FAILED
