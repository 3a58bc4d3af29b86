"""What Slurm has given to this job, read from its variables: hosts, tasks and cores, before MPI is up.

Nothing is asked of Slurm's daemons, so this works in containers, too, where its commands are missing.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...errors import LaunchError, listed, shortened
from .. import hosts as launch_hosts
from ..spec import Host, Job

_POLICY = "PRTE_MCA_rmaps_default_mapping_policy"
_MOST_HOSTS = 100_000
_PIECE = re.compile(r"([^\[\],]*)(?:\[([^\[\]]*)\])?")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


@dataclass(frozen=True)
class Allocation:
    """The hosts of a Slurm job.

    Args:
        job: its number.
        hosts: in Slurm's order, each with the tasks that it takes.
        cpus_per_task: cores of a task, None where the job did not ask for a number.
    """

    job: str
    hosts: tuple[Host, ...]
    cpus_per_task: int | None = None

    @property
    def tasks(self) -> int:
        return sum(host.slots or 0 for host in self.hosts)

    @property
    def hosts_alike(self) -> bool:
        """Whether all hosts take as many tasks."""
        return len({host.slots for host in self.hosts}) == 1

    def __str__(self) -> str:
        return f"job {self.job}, {self.tasks} tasks on {len(self.hosts)} hosts ({_shortened(self.hosts)})"


def allocation(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """What the job that this process is in has been given; None outside of a Slurm job.

    Raises:
        LaunchError: a variable of Slurm cannot be read, or two contradict each other.
    """
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    job = environ.get("SLURM_JOB_ID")
    if not job or not nodes:
        return None
    names = expand_hosts(nodes)
    tasks = expand_counts(environ.get("SLURM_TASKS_PER_NODE") or f"1(x{len(names)})")
    if len(tasks) != len(names):
        raise _unreadable(
            "SLURM_TASKS_PER_NODE", f"a number for each of the {len(names)} hosts of SLURM_JOB_NODELIST", len(tasks)
        )
    cpus = environ.get("SLURM_CPUS_PER_TASK")
    if cpus is not None and (not re.fullmatch("[0-9]{1,9}", cpus) or int(cpus) == 0):
        raise _unreadable("SLURM_CPUS_PER_TASK", "a number of cores", repr(cpus))
    hosts = tuple(Host(name, count) for name, count in zip(names, tasks, strict=True))
    return Allocation(job, hosts, None if cpus is None else int(cpus))


def require_one_component(environ: Mapping[str, str] = os.environ) -> None:
    """Raise `LaunchError` in a heterogeneous job: an mpirun there, or a plain srun, knows the first component alone."""
    text = environ.get("SLURM_HET_SIZE", "")
    if text.isdecimal() and int(text) > 1:
        raise LaunchError(
            "launch in a heterogeneous Slurm job", expected="one component", got=text,
            remedy=f"start all with `srun --mpi=pmix --het-group=0-{int(text) - 1} PROGRAM` (MPICH: --mpi=pmi2), "
            "or name hosts: --launcher ssh -H",
        )  # fmt: skip


def check(job: Job, given: Allocation, family: str) -> None:
    """Raises `LaunchError` where the mpirun of ``family`` could not start ``job`` on the hosts of ``given``.

    Open MPI's says so in a page of text, or starts nothing and has status 0; MPICH's waits for ever for a host that is
    not among them, but takes any number of processes.
    """
    slots = {host.name.partition(".")[0]: host.slots or 0 for host in given.hosts}
    for place in launch_hosts.place(job) if job.hosts else ():
        name = place.name.partition(".")[0]
        if name not in slots:
            if family == "openmpi" and launch_hosts.is_address(place.name):  # it asks the resolver
                continue
            raise LaunchError("launch -H", expected=f"hosts of {given}", got=place.name)
        if family == "openmpi" and place.processes > slots[name] and not _oversubscribes(job):
            raise _too_many("launch -H", f"{slots[name]} on {place.name}", given, place.processes)
    if family != "openmpi" or job.hosts or _oversubscribes(job):
        return
    if job.ranks + job.servers > given.tasks:
        raise _too_many("launch", str(given.tasks), given, job.ranks + job.servers)
    if job.ranks_per_node is not None:
        room = sum(min(host.slots or 0, job.ranks_per_node) for host in given.hosts)
        if job.ranks > room:
            raise _too_many("launch", f"{room} with {job.ranks_per_node} per node", given, job.ranks)


def _oversubscribes(job: Job) -> bool:
    policy = {**os.environ, **job.env}.get(_POLICY, "")
    return "oversubscribe" in f"{job.mpi_args} {policy}".lower()


def _too_many(operation: str, most: str, given: Allocation, got: int) -> LaunchError:
    return LaunchError(
        operation,
        expected=f"at most {most} in {given}",
        got=f"{got} processes",
        remedy=f"ask Slurm for more tasks, or set {_POLICY}=:oversubscribe",
    )


def expand_hosts(text: str) -> list[str]:
    """The names that a host list of Slurm stands for, in order: ``"a[1-2,04],b"`` is a1, a2, a04 and b.

    Raises:
        LaunchError: it is none, or stands for more than 100,000.
    """
    names: list[str] = []
    for entry in _entries(text):
        parts = list(_parts(entry, text))
        if len(names) + math.prod(map(len, parts)) > _MOST_HOSTS:
            raise _unreadable("host list", f"at most {_MOST_HOSTS:,} hosts", _cut(text))
        found = [""]
        for part in parts:
            found = [name + ending for name in found for ending in part]
        names += found
    return names


def expand_counts(text: str) -> list[int]:
    """The numbers of a list of Slurm with repetitions: ``"2(x3),1"`` is 2, 2, 2, 1.

    Raises:
        LaunchError: it is none, or has more than 100,000 numbers.
    """
    counts: list[int] = []
    for entry in text.split(","):
        found = _COUNT.fullmatch(entry)
        if found is None or int(found[2] or 1) == 0:
            raise _unreadable("numbers per host", "a list such as 2(x3),1", _cut(text))
        if len(counts) + int(found[2] or 1) > _MOST_HOSTS:
            raise _unreadable("numbers per host", f"at most {_MOST_HOSTS:,} of them", _cut(text))
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _entries(text: str) -> Iterator[str]:
    """What commas outside of brackets part."""
    depth, start = 0, 0
    for position, letter in enumerate(text + ","):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            yield text[start:position]
            start = position + 1
    if depth:
        raise _not_a_list(text)


def _parts(entry: str, text: str) -> Iterator[list[str]]:
    """The alternatives of each part of a name: itself, or the numbers in its brackets."""
    if not entry or re.search(r"[\s/'\"\\$`;&|<>()*?!]", entry):
        raise _not_a_list(text)
    position = 0
    while position < len(entry):
        found = _PIECE.match(entry, position)
        if found is None or found.end() == position:
            raise _not_a_list(text)
        if found[1]:
            yield [found[1]]
        if found[2] is not None:
            yield _numbers(found[2], text)
        position = found.end()


def _numbers(text: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for entry in text.split(","):
        found = _RANGE.fullmatch(entry)
        if found is None:
            raise _not_a_list(whole)
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise _not_a_list(whole)
        if last - first + len(numbers) >= _MOST_HOSTS:
            raise _unreadable("host list", f"at most {_MOST_HOSTS:,} hosts", _cut(whole))
        width = len(found[1])
        numbers += [f"{number:0{width}}" for number in range(first, last + 1)]
    return numbers


def _not_a_list(text: str) -> LaunchError:
    return _unreadable("host list", "names as in node[01-03,7],login1", _cut(text))


def _unreadable(what: str, expected: str, got: object) -> LaunchError:
    return LaunchError(f"read Slurm's {what}", expected=expected, got=got)


def _cut(text: str) -> str:
    return repr(shortened(text, 60))


def _shortened(hosts: tuple[Host, ...]) -> str:
    return listed([f"{host.name}:{host.slots}" for host in hosts], 4)
