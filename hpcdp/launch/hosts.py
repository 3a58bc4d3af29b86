"""Hosts: names, slots, network interfaces and resources.

The hosts of a job: as the user lists them, and which ranks and servers go to which.

A host file has one host a line, as ``mpirun`` (``node1 slots=2``), hydra (``node1:2``) or a plain list write it; what
follows a ``#`` is a comment. A host that comes twice has the slots of both lines.

What this process may use of its machine, read from the operating system; nothing is started or imported for it.

The network interface that a job's traffic between hosts takes.

What Slurm has given to this job, read from its variables: hosts, tasks and cores, before MPI is up.

Nothing is asked of Slurm's daemons, so this works in containers, too, where its commands are missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import math
import os
import re
import resource
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, LaunchError, listed, shortened
from .spec import Host, Job

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


def check_allocation(job: Job, given: Allocation, family: str) -> None:
    """Raises `LaunchError` where the mpirun of ``family`` could not start ``job`` on the hosts of ``given``.

    Open MPI's says so in a page of text, or starts nothing and has status 0; MPICH's waits for ever for a host that is
    not among them, but takes any number of processes.
    """
    slots = {host.name.partition(".")[0]: host.slots or 0 for host in given.hosts}
    for place in assign_ranks(job) if job.hosts else ():
        name = place.name.partition(".")[0]
        if name not in slots:
            if family == "openmpi" and is_address(place.name):  # it asks the resolver
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


_MIB = 1 << 20


def usable_cores() -> list[int]:
    """The numbers of the cores in this process's affinity mask."""
    return sorted(os.sched_getaffinity(0))


def cores_of(pid: int) -> str:
    """The cores in a process's affinity mask, as `ranges` writes them; empty for one that has ended."""
    with contextlib.suppress(OSError):
        return ranges(sorted(os.sched_getaffinity(pid)))
    return ""


def core_quota() -> float | None:
    """The cores' worth of time that the control group allows a second, None without a limit."""
    for path in ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us"):
        try:
            limit, period = [*Path(path).read_text().split(), "100000"][:2]
        except OSError:
            continue
        return int(limit) / int(period) if limit.isdecimal() else None
    return None


def memory_mib() -> tuple[int, int]:
    """(total, available) memory in MiB, both at most the control group's limit."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(lines[key].split()[0]) // 1024 for key in ("MemTotal", "MemAvailable"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = Path(path).read_text().strip()
        except OSError:
            continue
        if limit.isdecimal():
            total, available = min(total, int(limit) // _MIB), min(available, int(limit) // _MIB)
    return total, available


def files_in_use(prefix: str) -> set[str]:
    """The files below ``prefix`` that processes of this user map or hold open; those of other users are not shown."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines = (process / "maps").read_text(errors="surrogateescape").splitlines()
            found |= {line.split(maxsplit=5)[5] for line in lines if prefix in line}
            for entry in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    found.add(os.readlink(entry))
    return {path for path in found if path.startswith(prefix)}


def started_at_s(name: str) -> list[float]:
    """When each process of that name was started, in seconds since the epoch, give or take one (proc(5))."""
    found = []
    booted_s = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if "btime" in line)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, fields = stat.read_bytes().rpartition(b") ")
            if head.partition(b"(")[2] == name.encode():
                found.append(booted_s + int(fields.split()[19]) / os.sysconf("SC_CLK_TCK"))
    return found


def gpus() -> list[str]:
    """The models of this machine's NVIDIA GPUs, as their driver names them."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        names.append(lines.get("Model", "unknown").strip())
    return names


def version(distribution: str) -> str | None:
    """The version of an installed Python distribution, None if it is not installed."""
    import importlib.metadata  # an eighth of the time of a launch

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def ranges(numbers: list[int]) -> str:
    """Sorted numbers as a list of ranges, the way that taskset writes cores: "0-3,8"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


# netdevice(7) and linux/if.h: a struct ifreq is 40 bytes, the name in 16 and then the flags
_GET_FLAGS, _REQUEST, _FLAGS_AT, _UP, _LOOPBACK = 0x8913, "16sH22x", 16, 0x1, 0x8


def here() -> list[str]:
    """The names of this machine's interfaces."""
    return [name for _, name in socket.if_nameindex()]


def to_other_hosts() -> list[str]:
    """Of those the ones that are up and no loopback."""
    return [name for name in here() if _flags(name) & (_UP | _LOOPBACK) == _UP]


def is_loopback(name: str) -> bool:
    """Whether an interface of this machine leads to itself alone."""
    return bool(_flags(name) & _LOOPBACK)


def loopback() -> str:
    """The name of the one that leads to this machine alone."""
    return next(filter(is_loopback, here()), "lo")


def check(name: str, *, several_hosts: bool) -> None:
    """Raises `ConfigError`, which lists what is valid, unless this machine has that interface, and it leads to the
    others where there are several."""
    valid = to_other_hosts() if several_hosts else here()
    if name in valid:
        return
    why = ", which leads to no other host" if name in here() else ""
    expected = f"one of {', '.join(valid)}" if valid else "a machine with an interface that is up"
    raise ConfigError("launch --interface", expected=expected, got=f"{name!r}{why}")


def problem(name: str) -> str | None:
    """Why an interface cannot carry traffic between this machine and others; None where it can."""
    valid = to_other_hosts()
    if name in valid:
        return None
    what = f"network interface {name!r} leads to no other host" if name in here() else f"no network interface {name!r}"
    return f"{what}; valid: {', '.join(valid) or 'none is up'}"


def devices(name: str) -> str:
    """What UCX calls an interface: itself, and before it the adapters that it belongs to, e.g. ``mlx5_0:1,ib0``."""
    adapters = sorted(Path("/sys/class/net", name, "device", "infiniband").glob("*"))
    return ",".join([*(f"{adapter.name}:1" for adapter in adapters), name])


def _flags(name: str) -> int:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack(_REQUEST, name.encode(), 0)
        return int(struct.unpack_from("H", fcntl.ioctl(any_socket, _GET_FLAGS, request), _FLAGS_AT)[0])
    return 0


_VALID = "HOST, HOST:SLOTS or HOST slots=SLOTS, with a HOST that ssh knows"
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?")
_OF_FILES = (".txt", ".hosts", ".host", ".nodes", ".list", ".lst", ".conf", ".cfg", ".csv")
_MOST_SLOTS = 1_000_000
_MOST_BYTES = 64 << 20
_MOST_LOOK_UPS = 512
"""Look-ups at a time, each in a thread."""


def read(text: str) -> tuple[Host, ...]:
    """What ``-H`` names: the file of that name, else the hosts themselves, ``node1:4,node2:4``.

    Raises:
        ConfigError: it is no list of hosts; it names file, line and what is valid.
    """
    path = Path(text)
    if "/" in text or path.suffix in _OF_FILES or os.path.exists(text):  # of any length, as no name of a file may be
        return read_file(path)
    return merged([_host(part, f"-H {text!r}") for part in text.split(",")])


def read_file(path: Path) -> tuple[Host, ...]:
    """The hosts of a file. Raises as `read` does."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES)
    except OSError as error:
        expected = "a file of hosts, or node1:4,node2:4"
        raise ConfigError("launch -H", where=path, expected=expected, got=error.strerror) from error
    found = []
    for number, line in enumerate(content.decode("utf-8-sig", "replace").splitlines(), 1):
        said = line.partition("#")[0].strip()
        if said:
            found.append(_host(said, f"{path}, line {number}"))
    if not found:
        raise ConfigError("read hosts", where=path, expected=f"lines of {_VALID}", got="none")
    return merged(found)


def _host(text: str, where: str) -> Host:
    """One host with what is said of it."""
    name, *said = re.sub(r"\s*=\s*", "=", text).split() or [""]
    slots = None
    if bracketed := re.fullmatch(r"\[(.*)\](?::(.*))?", name):
        name, slots = bracketed.groups()
        is_address = _is_ipv6(name)
    elif name.count(":") > 1 and _is_ipv6(name):
        is_address = True
    else:
        is_address = False
        name, colon, count = name.partition(":")
        slots = count if colon else None
    for word in said:
        key, _, value = word.partition("=")
        if key not in ("slots", "max_slots", "max-slots") or (key == "slots" and slots is not None):
            raise ConfigError("read hosts", where=where, expected=_VALID, got=repr(text[:200]))
        _slots(value, text, where)
        slots = value if key == "slots" else slots
    if not is_address and not _NAME.fullmatch(name):
        raise ConfigError(
            "read hosts",
            where=where,
            expected=_VALID,
            got=repr(text[:200]),
            remedy="users, ports and jumps belong into ~/.ssh/config",
        )
    return Host(name, None if slots is None else _slots(slots, text, where))


def _slots(text: str, line: str, where: str) -> int:
    if not re.fullmatch("[0-9]{1,7}", text) or not 1 <= int(text) <= _MOST_SLOTS:
        raise ConfigError(
            "read hosts", where=where, expected=f"1 to {_MOST_SLOTS:,} slots", got=f"{text[:50]!r} in {line[:200]!r}"
        )
    return int(text)


def is_address(text: str) -> bool:
    """Whether a host's name is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_ipv6(text: str) -> bool:
    return ":" in text and "%" not in text and is_address(text)


def merged(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Each host once; a line that does not say slots counts as one where others of the host, or others at all, do."""
    known: dict[str, list[int | None]] = {}
    for host in hosts:
        known.setdefault(host.name, []).append(host.slots)
    counted = any(slots is not None for host in hosts for slots in [host.slots]) or len(known) < len(hosts)
    return tuple(
        Host(name, sum(1 if each is None else each for each in slots) if counted else None)
        for name, slots in known.items()
    )


@dataclass(frozen=True)
class HostSlots:
    """A host of a job, with how many ranks and servers it gets."""

    name: str
    ranks: int
    servers: int = 0

    @property
    def processes(self) -> int:
        return self.ranks + self.servers


def assign_ranks(job: Job) -> tuple[HostSlots, ...]:
    """The hosts that get something, in their order: ranks in blocks, servers where there are fewest of them.

    Hosts with slots are filled one after the other, as mpirun does; a plain list shares the ranks out evenly, unless
    `Job.ranks_per_node` says how many go to a host.

    Raises:
        LaunchError: there is not enough room.
    """
    free = [job.ranks + job.servers if host.slots is None else host.slots for host in job.hosts]
    plain = all(host.slots is None for host in job.hosts)
    most = job.ranks_per_node or (-(-job.ranks // len(free)) if plain else job.ranks)
    ranks, servers, left = [], [0] * len(free), job.ranks
    for index, slots in enumerate(free):
        if plain and job.ranks_per_node is None:
            most = -(-left // (len(free) - index))
        ranks.append(min(slots, most, left))
        left -= ranks[-1]
    for _ in range(job.servers):
        with_room = [index for index, slots in enumerate(free) if ranks[index] + servers[index] < slots]
        if left or not with_room:
            break
        servers[min(with_room, key=lambda index: (servers[index], ranks[index], index))] += 1
    if left or sum(servers) < job.servers:
        raise _too_few(job, sum(min(slots, most) for slots in free))
    return tuple(
        HostSlots(host.name, count, beside)
        for host, count, beside in zip(job.hosts, ranks, servers, strict=True)
        if count or beside
    )


def of_ranks(places: Sequence[HostSlots]) -> list[str]:
    """The host of each rank, then of each server."""
    ranks = [place.name for place in places for _ in range(place.ranks)]
    return ranks + [place.name for place in places for _ in range(place.servers)]


def _too_few(job: Job, room: int) -> LaunchError:
    named = listed([f"{host.name}:{host.slots}" if host.slots else host.name for host in job.hosts])
    asked = f"{job.ranks} ranks" + (f" and {job.servers} servers" if job.servers else "")
    limit = f" with {job.ranks_per_node} ranks per node" if job.ranks_per_node else ""
    total = sum(host.slots or 0 for host in job.hosts)
    has = f"{min(room, total) if total else room} on {named}{limit}"
    return LaunchError("launch -H", expected=f"slots for {asked}", got=has, remedy="name more hosts, or slots=N")


def is_this_machine(name: str) -> bool:
    """Return whether a host's name means the machine that this runs on; one that only ssh knows does not."""
    own = socket.gethostname()
    if name in ("localhost", own) or name == own.partition(".")[0] or name.partition(".")[0] == own:
        return True
    return any(_is_own(family, address) for family, address in _addresses(name))


def those_of_this_machine(names: Iterable[str]) -> set[str]:
    """Return the names that mean this machine; they are looked up at once: one that nobody knows may take seconds."""
    left, found = deque(dict.fromkeys(names)), set[str]()

    def look() -> None:
        with contextlib.suppress(IndexError):
            while True:
                name = left.popleft()
                if is_this_machine(name):
                    found.add(name)

    # Daemons: Ctrl-C does not wait for them.
    most = max(1, min(_MOST_LOOK_UPS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))  # each has a socket
    threads = [threading.Thread(target=look, daemon=True) for _ in range(min(len(left), most))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@functools.cache
def _addresses(name: str) -> list[tuple[int, tuple[object, ...]]]:
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # the latter of an empty or long label, which may be an alias of ssh's
        return []
    return [(family, address) for family, _, _, _, address in found]


def _is_own(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
