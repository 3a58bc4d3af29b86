"""The hosts of a job and the resources of this machine.

- `allocation` reads the hosts, tasks and cores of a Slurm job from its variables alone, so it also works in containers
  without Slurm's commands.
- `read` parses ``-H``. A host file has one host a line, as ``mpirun`` (``node1 slots=2``), hydra (``node1:2``) or a
  plain list write it; ``#`` begins a comment. A host that is listed twice has the slots of both lines.
- `assign_ranks` distributes ranks and servers over hosts.
- Cores, memory, GPUs and network interfaces of this machine are read from the operating system; no process is started.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import itertools
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

from ..errors import ConfigError, LaunchError, listed, reason, shortened
from .launchers import Host, Job

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
        hosts: in Slurm's order, each with its number of tasks as slots.
        cpus_per_task: cores of a task; None where the job did not request a number.
    """

    job: str
    hosts: tuple[Host, ...]
    cpus_per_task: int | None = None

    @property
    def tasks(self) -> int:
        """Return the number of tasks on all hosts."""
        return sum(host.slots or 0 for host in self.hosts)

    @property
    def hosts_alike(self) -> bool:
        """Return whether all hosts have the same number of tasks."""
        return len({host.slots for host in self.hosts}) == 1

    def __str__(self) -> str:
        names = listed([f"{host.name}:{host.slots}" for host in self.hosts], 4)
        return f"job {self.job}, {self.tasks} tasks on {len(self.hosts)} hosts ({names})"


def allocation(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """Return the allocation of the Slurm job of this process; None outside of one.

    Raises:
        LaunchError: a variable of Slurm is malformed, or two contradict each other.
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


def require_one_component() -> None:
    """Raise `LaunchError` in a heterogeneous job, of which mpirun and a plain srun see only the first component."""
    text = os.environ.get("SLURM_HET_SIZE", "")
    if text.isdecimal() and int(text) > 1:
        raise LaunchError(
            "launch in a heterogeneous Slurm job", expected="one component", got=text,
            remedy=f"start all with `srun --mpi=pmix --het-group=0-{int(text) - 1} PROGRAM` (MPICH: --mpi=pmi2), "
            "or give hosts: --launcher ssh -H",
        )  # fmt: skip


def check_allocation(job: Job, allocated: Allocation, family: str) -> None:
    """Raise `LaunchError` where the mpirun of ``family`` could not start ``job`` on the allocation ``allocated``.

    Open MPI's mpirun prints a page of text, or starts nothing and exits with status 0. MPICH's accepts any number of
    processes, but waits forever for a host outside the allocation.
    """
    slots = {host.name.partition(".")[0]: host.slots or 0 for host in allocated.hosts}
    for place in assign_ranks(job) if job.hosts else ():
        name = place.name.partition(".")[0]
        if name not in slots:
            if family == "openmpi" and is_address(place.name):  # mpirun resolves addresses
                continue
            raise LaunchError("launch -H", expected=f"hosts of {allocated}", got=place.name)
        if family == "openmpi" and place.processes > slots[name] and not _oversubscribes(job):
            raise _too_many("launch -H", f"{slots[name]} on {place.name}", allocated, place.processes)
    if family != "openmpi" or job.hosts or _oversubscribes(job):
        return
    if job.ranks + job.servers > allocated.tasks:
        raise _too_many("launch", str(allocated.tasks), allocated, job.ranks + job.servers)
    if job.ranks_per_node is not None:
        room = sum(min(host.slots or 0, job.ranks_per_node) for host in allocated.hosts)
        if job.ranks > room:
            raise _too_many("launch", f"{room} with {job.ranks_per_node} per node", allocated, job.ranks)


def _oversubscribes(job: Job) -> bool:
    policy = {**os.environ, **job.env}.get(_POLICY, "")
    return "oversubscribe" in f"{job.mpi_args} {policy}".lower()


def _too_many(operation: str, most: str, allocated: Allocation, got: int) -> LaunchError:
    return LaunchError(
        operation,
        expected=f"at most {most} in {allocated}",
        got=f"{got} processes",
        remedy=f"request more tasks from Slurm, or set {_POLICY}=:oversubscribe",
    )


def expand_hosts(text: str) -> list[str]:
    """Expand a host list of Slurm, in order: ``"a[1-2,04],b"`` is a1, a2, a04 and b.

    Raises:
        LaunchError: the text is no host list, or has more than 100,000 hosts.
    """
    names: list[str] = []
    for entry in _entries(text):
        parts = list(_parts(entry, text))
        if len(names) + math.prod(map(len, parts)) > _MOST_HOSTS:
            raise _unreadable("host list", f"at most {_MOST_HOSTS:,} hosts", _cut(text))
        names += map("".join, itertools.product(*parts))
    return names


def expand_counts(text: str) -> list[int]:
    """Expand a list of Slurm with repetitions: ``"2(x3),1"`` is 2, 2, 2, 1.

    Raises:
        LaunchError: the text is no such list, or has more than 100,000 numbers.
    """
    counts: list[int] = []
    for entry in text.split(","):
        match = _COUNT.fullmatch(entry)
        repeats = int(match[2] or 1) if match else 0
        if match is None or repeats == 0:
            raise _unreadable("numbers per host", "a list such as 2(x3),1", _cut(text))
        if len(counts) + repeats > _MOST_HOSTS:
            raise _unreadable("numbers per host", f"at most {_MOST_HOSTS:,} of them", _cut(text))
        counts += [int(match[1])] * repeats
    return counts


def _entries(text: str) -> Iterator[str]:
    """Yield the pieces of a list between commas outside of brackets."""
    depth, start = 0, 0
    for position, letter in enumerate(text + ","):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            yield text[start:position]
            start = position + 1
    if depth:
        raise _not_a_list(text)


def _parts(entry: str, text: str) -> Iterator[list[str]]:
    """Yield the alternatives of each part of a name: the part itself, or the numbers in its brackets."""
    if not entry or re.search(r"[\s/'\"\\$`;&|<>()*?!]", entry):
        raise _not_a_list(text)
    position = 0
    while position < len(entry):
        piece = _PIECE.match(entry, position)
        if piece is None or piece.end() == position:
            raise _not_a_list(text)
        if piece[1]:
            yield [piece[1]]
        if piece[2] is not None:
            yield _numbers(piece[2], text)
        position = piece.end()


def _numbers(text: str, host_list: str) -> list[str]:
    numbers: list[str] = []
    for entry in text.split(","):
        match = _RANGE.fullmatch(entry)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _not_a_list(host_list)
        first, last, width = int(match[1]), int(match[2] or match[1]), len(match[1])
        if last - first + len(numbers) >= _MOST_HOSTS:
            raise _unreadable("host list", f"at most {_MOST_HOSTS:,} hosts", _cut(host_list))
        numbers += [f"{number:0{width}}" for number in range(first, last + 1)]
    return numbers


def _not_a_list(text: str) -> LaunchError:
    return _unreadable("host list", "names as in node[01-03,7],login1", _cut(text))


def _unreadable(what: str, expected: str, got: object) -> LaunchError:
    return LaunchError(f"read Slurm's {what}", expected=expected, got=got)


def _cut(text: str) -> str:
    return repr(shortened(text, 60))


_MIB = 1 << 20


def usable_cores() -> list[int]:
    """Return the numbers of the cores in this process's affinity mask."""
    return sorted(os.sched_getaffinity(0))


def cores_of(pid: int) -> str:
    """Return the cores in a process's affinity mask in the format of `ranges`; empty for a process that has ended."""
    with contextlib.suppress(OSError):
        return ranges(sorted(os.sched_getaffinity(pid)))
    return ""


def core_quota() -> float | None:
    """Return the number of cores whose time the control group allows, e.g. 1.5; None without a limit."""
    for path in ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us"):
        try:
            limit, period = [*Path(path).read_text().split(), "100000"][:2]
        except OSError:
            continue
        return int(limit) / int(period) if limit.isdecimal() else None
    return None


def memory_mib() -> tuple[int, int]:
    """Return the total and the available memory in MiB, both at most the control group's limit."""
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
    """Return the files below ``prefix`` that processes of this user map or hold open; /proc hides other users'."""
    paths = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines = (process / "maps").read_text(errors="surrogateescape").splitlines()
            paths |= {line.split(maxsplit=5)[5] for line in lines if prefix in line}
            for entry in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    paths.add(os.readlink(entry))
    return {path for path in paths if path.startswith(prefix)}


def started_at_s(name: str) -> list[float]:
    """Return the start time of each process of that name, in seconds since the epoch, to about 1 s (proc(5))."""
    times = []
    booted_s = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if "btime" in line)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, fields = stat.read_bytes().rpartition(b") ")
            if head.partition(b"(")[2] == name.encode():
                times.append(booted_s + int(fields.split()[19]) / os.sysconf("SC_CLK_TCK"))
    return times


def gpus() -> list[str]:
    """Return the models of this machine's NVIDIA GPUs, from their driver."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        names.append(lines.get("Model", "unknown").strip())
    return names


def version(distribution: str) -> str | None:
    """Return the version of an installed Python distribution; None if it is not installed."""
    import importlib.metadata  # imported here, as it takes an eighth of the time of a launch

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def ranges(numbers: list[int]) -> str:
    """Format sorted numbers as taskset writes cores: ``"0-3,8"``."""
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
    """Return the names of this machine's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def to_other_hosts() -> list[str]:
    """Return the names of this machine's interfaces that are up and not loopback."""
    return [name for name in here() if _flags(name) & (_UP | _LOOPBACK) == _UP]


def is_loopback(name: str) -> bool:
    """Return whether a network interface is a loopback."""
    return bool(_flags(name) & _LOOPBACK)


def loopback() -> str:
    """Return the name of the loopback interface."""
    return next(filter(is_loopback, here()), "lo")


def check(name: str, *, several_hosts: bool) -> None:
    """Raise `ConfigError` unless this machine has the interface and, with ``several_hosts``, it reaches other hosts."""
    valid = to_other_hosts() if several_hosts else here()
    if name in valid:
        return
    why = ", which reaches no other host" if name in here() else ""
    expected = f"one of {', '.join(valid)}" if valid else "a machine with an interface that is up"
    raise ConfigError("launch --interface", expected=expected, got=f"{name!r}{why}")


def problem(name: str) -> str | None:
    """Return why an interface cannot carry traffic between this machine and others; None where it can."""
    valid = to_other_hosts()
    if name in valid:
        return None
    why = f"network interface {name!r} reaches no other host" if name in here() else f"no network interface {name!r}"
    return f"{why}; valid: {', '.join(valid) or 'none is up'}"


def devices(name: str) -> str:
    """Return UCX's names of an interface: its InfiniBand adapters, then itself, e.g. ``mlx5_0:1,ib0``."""
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
"""Greatest number of concurrent name look-ups, each in a thread."""


def read(text: str) -> tuple[Host, ...]:
    """Parse the value of ``-H``: the name of a host file, else the hosts themselves, ``node1:4,node2:4``.

    Raises:
        ConfigError: the text or the file is no list of hosts.
    """
    path = Path(text)
    if "/" in text or path.suffix in _OF_FILES or os.path.exists(text):  # Path.exists raises for long names
        return read_file(path)
    return merged([_host(part, f"-H {text!r}") for part in text.split(",")])


def read_file(path: Path) -> tuple[Host, ...]:
    """Read the hosts of a file; raise the errors of `read`."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES)
    except OSError as error:
        expected = "a file of hosts, or node1:4,node2:4"
        raise ConfigError("launch -H", where=path, expected=expected, got=reason(error)) from error
    hosts = []
    for number, line in enumerate(content.decode("utf-8-sig", "replace").splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if entry:
            hosts.append(_host(entry, f"{path}, line {number}"))
    if not hosts:
        raise ConfigError("read hosts", where=path, expected=f"lines of {_VALID}", got="none")
    return merged(hosts)


def _host(text: str, where: str) -> Host:
    """Parse one entry of a host list."""
    name, *attributes = re.sub(r"\s*=\s*", "=", text).split() or [""]
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
    for attribute in attributes:
        key, _, value = attribute.partition("=")
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
            remedy="set users, ports and jumps in ~/.ssh/config",
        )
    return Host(name, None if slots is None else _slots(slots, text, where))


def _slots(text: str, line: str, where: str) -> int:
    if not re.fullmatch("[0-9]{1,7}", text) or not 1 <= int(text) <= _MOST_SLOTS:
        raise ConfigError(
            "read hosts", where=where, expected=f"1 to {_MOST_SLOTS:,} slots", got=f"{text[:50]!r} in {line[:200]!r}"
        )
    return int(text)


def is_address(text: str) -> bool:
    """Return whether a host's name is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_ipv6(text: str) -> bool:
    return ":" in text and "%" not in text and is_address(text)


def merged(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Merge repeated hosts; an entry without slots counts as one slot if any entry has slots or a host is repeated."""
    known: dict[str, list[int | None]] = {}
    for host in hosts:
        known.setdefault(host.name, []).append(host.slots)
    has_slots = any(host.slots is not None for host in hosts) or len(known) < len(hosts)
    return tuple(
        Host(name, sum(1 if count is None else count for count in slots) if has_slots else None)
        for name, slots in known.items()
    )


@dataclass(frozen=True)
class HostSlots:
    """A host of a job, with its numbers of ranks and servers."""

    name: str
    ranks: int
    servers: int = 0

    @property
    def processes(self) -> int:
        """Return the number of ranks and servers."""
        return self.ranks + self.servers


def assign_ranks(job: Job) -> tuple[HostSlots, ...]:
    """Assign ranks in blocks to hosts, and each server to the host with the fewest; return the hosts in use, in order.

    Hosts with slots are filled one after the other, as mpirun does. A plain list shares the ranks out evenly, up to
    `hpcdp.launch.launchers.Job.ranks_per_node` on a host.

    Raises:
        LaunchError: the hosts have too few slots.
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
        open_hosts = [index for index, slots in enumerate(free) if ranks[index] + servers[index] < slots]
        if left or not open_hosts:
            break
        servers[min(open_hosts, key=lambda index: (servers[index], ranks[index], index))] += 1
    if left or sum(servers) < job.servers:
        raise _too_few(job, sum(min(slots, most) for slots in free))
    return tuple(
        HostSlots(host.name, num_ranks, num_servers)
        for host, num_ranks, num_servers in zip(job.hosts, ranks, servers, strict=True)
        if num_ranks or num_servers
    )


def of_ranks(places: Sequence[HostSlots]) -> list[str]:
    """Return the host of each rank, then of each server."""
    ranks = [place.name for place in places for _ in range(place.ranks)]
    return ranks + [place.name for place in places for _ in range(place.servers)]


def _too_few(job: Job, slots: int) -> LaunchError:
    names = listed([f"{host.name}:{host.slots}" if host.slots else host.name for host in job.hosts])
    needed = f"{job.ranks} ranks" + (f" and {job.servers} servers" if job.servers else "")
    limit = f" with {job.ranks_per_node} ranks per node" if job.ranks_per_node else ""
    total = sum(host.slots or 0 for host in job.hosts)
    got = f"{min(slots, total) if total else slots} on {names}{limit}"
    return LaunchError("launch -H", expected=f"slots for {needed}", got=got, remedy="add hosts, or slots=N")


def is_this_machine(name: str) -> bool:
    """Return whether a host's name means this machine; an alias of ssh's configuration does not."""
    own = socket.gethostname()
    if name in ("localhost", own) or name == own.partition(".")[0] or name.partition(".")[0] == own:
        return True
    return any(_is_own(family, address) for family, address in _addresses(name))


def those_of_this_machine(names: Iterable[str]) -> set[str]:
    """Return the names that mean this machine; look them up concurrently, as an unknown name may take seconds."""
    pending, own = deque(dict.fromkeys(names)), set[str]()

    def look_up() -> None:
        with contextlib.suppress(IndexError):
            while True:
                name = pending.popleft()
                if is_this_machine(name):
                    own.add(name)

    # Daemon threads, so that Ctrl-C does not wait for them; each has a socket.
    most = max(1, min(_MOST_LOOK_UPS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
    threads = [threading.Thread(target=look_up, daemon=True) for _ in range(min(len(pending), most))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return own


@functools.cache
def _addresses(name: str) -> list[tuple[int, tuple[object, ...]]]:
    try:
        records = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # UnicodeError: an empty or long label, which may be an alias of ssh's
        return []
    return [(family, address) for family, _, _, _, address in records]


def _is_own(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
