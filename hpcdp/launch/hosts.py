"""The hosts of a job: as the user lists them, and which ranks and servers go to which.

A host file has one host a line, as ``mpirun`` (``node1 slots=2``), hydra (``node1:2``) or a plain list write it; what
follows a ``#`` is a comment. A host that comes twice has the slots of both lines.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import re
import resource
import socket
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, LaunchError, listed
from .job import Host, Job

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
class Place:
    """A host of a job, with how many ranks and servers it gets."""

    name: str
    ranks: int
    servers: int = 0

    @property
    def processes(self) -> int:
        return self.ranks + self.servers


def place(job: Job) -> tuple[Place, ...]:
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
        Place(host.name, count, beside)
        for host, count, beside in zip(job.hosts, ranks, servers, strict=True)
        if count or beside
    )


def of_ranks(places: Sequence[Place]) -> list[str]:
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
