"""Host files as mpirun, hydra and people write them, and who goes where."""

import os
import random
import socket
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from hpcdp.errors import ConfigError, HpcdpError, LaunchError
from hpcdp.launch.hosts import HostSlots, assign_ranks, is_this_machine, read, read_file, those_of_this_machine
from hpcdp.launch.launchers import Host, Job

INPUTS = 100_000 if os.environ.get("HPCDP_TEST_THOROUGH") == "1" else 1_000


def job(text: str, ranks: int, servers: int = 0, ranks_per_node: int | None = None) -> Job:
    return Job(("x",), ranks, servers, hosts=read(text), ranks_per_node=ranks_per_node)


def test_the_three_ways_of_a_host_file_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "# the first rack\n\nnode1 slots=2\n  node2:3   # faster\nnode3\n[fe80::1]:4\nfe80::2 slots=1 max_slots=9\r\n"
        "node_4.site.org max-slots=2 slots=1\n"
    )
    assert read_file(path) == (
        Host("node1", 2),
        Host("node2", 3),
        Host("node3", 1),
        Host("fe80::1", 4),
        Host("fe80::2", 1),
        Host("node_4.site.org", 1),
    )


def test_a_plain_list_says_no_slots_and_a_host_that_comes_twice_has_both(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("b\na\n")
    assert read_file(path) == (Host("b"), Host("a"))
    path.write_text("a\nb\na\n")
    assert read_file(path) == (Host("a", 2), Host("b", 1))
    path.write_text("a:2\nb:1\na slots=3")
    assert read(str(path)) == (Host("a", 5), Host("b", 1))


def test_a_list_on_the_command_line() -> None:
    assert read("a:2,b:1") == (Host("a", 2), Host("b", 1))
    assert read("a,[::1]") == (Host("a"), Host("::1"))


def test_a_list_on_the_command_line_may_be_longer_than_a_files_name() -> None:
    names = [f"node{number:03}" for number in range(64)]
    assert read(",".join(f"{name}:4" for name in names)) == tuple(Host(name, 4) for name in names)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("node1 slots=2\nnode2 slots=x\n", "line 2]: expected 1 to 1,000,000 slots, got 'x' in 'node2 slots=x'"),
        ("node1 slots=0", "line 1]: expected 1 to 1,000,000 slots, got '0'"),
        ("node1:", "line 1]: expected 1 to 1,000,000 slots, got '' in 'node1:'"),
        ("node1:2 slots=2", "line 1]: expected HOST, HOST:SLOTS or HOST slots=SLOTS"),
        ("node1 cpu=2", "got 'node1 cpu=2'"),
        ("a@node1", "got 'a@node1'; set users, ports and jumps in ~/.ssh/config"),
        ("-oProxyCommand=x", "got '-oProxyCommand=x'"),
        ("node1;reboot", "got 'node1;reboot'"),
        ("[node1]:2", None),
        ("node1 slots = 2", None),
        (b"\xef\xbb\xbfnode1:2\r\n", None),
        ("1:2:3", "got '2:3' in '1:2:3'"),
        ("# none\n\n", "expected lines of HOST, HOST:SLOTS or HOST slots=SLOTS, with a HOST that ssh knows, got none"),
        (b"\xff\xfe\0n\0", "line 1]"),
    ],
)
def test_what_is_no_host_is_named_with_file_and_line(text: str | bytes, says: str | None, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    if says is None:
        assert read_file(path) == (Host("node1", 2),)
        return
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert str(path) in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("none/hosts", "[none/hosts]: expected a file of hosts, or node1:4,node2:4, got no such file or folder"),
        ("typo.txt", "[typo.txt]: expected a file of hosts, or node1:4,node2:4, got no such file or folder"),
        (f"/{'x' * 300}", "got a name that is too long"),
        ("", "[-H '']"),
        ("a,,b", "[-H 'a,,b']"),
        (".", "got a folder"),
    ],
)
def test_what_the_option_does_not_take(text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert says in str(caught.value)


def test_random_files_are_hosts_or_one_line(tmp_path: Path) -> None:
    path, pick = tmp_path / "hosts", random.Random(7)
    words = [
        "node1",
        "n2",
        ":",
        "slots",
        "=",
        " ",
        "\n",
        "#",
        "[",
        "]",
        "::1",
        "4",
        "-",
        "max_slots",
        ",",
        "\0",
        "é",
        "0",
    ]
    valid = 0
    for _ in range(INPUTS):
        path.write_bytes("".join(pick.choices(words, k=pick.randrange(1, 9))).encode())
        try:
            found = read_file(path)
        except ConfigError as error:
            assert "\n" not in str(error) and str(path) in str(error)
            continue
        valid += 1
        for host in found:
            assert not host.name.startswith("-") and not set(host.name) & set(" \n\0;#[]=,")
            assert host.slots is None or host.slots >= 1
        assert len({host.name for host in found}) == len(found)
    assert valid > INPUTS / 100


@pytest.mark.parametrize(
    ("text", "ranks", "servers", "per_node", "expected"),
    [
        ("a,b", 1, 0, None, [("a", 1, 0)]),
        ("a,b", 2, 0, None, [("a", 1, 0), ("b", 1, 0)]),
        ("a,b", 5, 0, None, [("a", 3, 0), ("b", 2, 0)]),
        ("a,b,c", 4, 0, 2, [("a", 2, 0), ("b", 2, 0)]),
        ("a:2,b:4", 4, 0, None, [("a", 2, 0), ("b", 2, 0)]),
        ("a:4,b:4", 4, 2, None, [("a", 4, 0), ("b", 0, 2)]),
        ("a:4,b:4", 4, 0, 2, [("a", 2, 0), ("b", 2, 0)]),
        ("a,b", 4, 2, None, [("a", 2, 1), ("b", 2, 1)]),
        ("a,b", 3, 1, None, [("a", 2, 0), ("b", 1, 1)]),
        ("a:1,b:1,c:2", 2, 2, None, [("a", 1, 0), ("b", 1, 0), ("c", 0, 2)]),
        ("a,b,c", 1, 1, None, [("a", 1, 0), ("b", 0, 1)]),
    ],
)
def test_who_goes_where(
    text: str, ranks: int, servers: int, per_node: int | None, expected: list[tuple[str, int, int]]
) -> None:
    assert assign_ranks(job(text, ranks, servers, per_node)) == tuple(HostSlots(*each) for each in expected)


@pytest.mark.parametrize(
    ("text", "ranks", "servers", "per_node", "says"),
    [
        ("a:1,b:2", 4, 0, None, "expected slots for 4 ranks, got 3 on a:1, b:2"),
        ("a:2,b:2", 4, 1, None, "expected slots for 4 ranks and 1 servers, got 4 on a:2, b:2"),
        ("a,b", 5, 0, 2, "got 4 on a, b with 2 ranks per node"),
    ],
)
def test_too_few_slots(text: str, ranks: int, servers: int, per_node: int | None, says: str) -> None:
    with pytest.raises(LaunchError) as caught:
        assign_ranks(job(text, ranks, servers, per_node))
    assert says in str(caught.value)


def test_random_places_hold_all_and_no_more_than_there_is_room() -> None:
    pick = random.Random(3)
    for _ in range(2_000):
        names = [f"n{index}" for index in range(pick.randrange(1, 6))]
        slots = [f":{pick.randrange(1, 5)}" if pick.random() < 0.7 else "" for _ in names]
        per_node = pick.choice([None, 1, 2, 3])
        asked = job(
            ",".join(map("".join, zip(names, slots, strict=True))), pick.randrange(1, 9), pick.randrange(3), per_node
        )
        try:
            found = assign_ranks(asked)
        except HpcdpError:
            assert per_node or any(slots)
            continue
        room = {host.name: host.slots for host in asked.hosts}
        assert (sum(each.ranks for each in found), sum(each.servers for each in found)) == (asked.ranks, asked.servers)
        for each in found:
            assert each.processes > 0 and each.ranks <= (per_node or asked.ranks)
            assert each.processes <= (room[each.name] or each.processes)


def test_this_machine_is_known_by_its_names_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "here.site")
    assert all(map(is_this_machine, ("localhost", "here", "here.site", "127.0.0.1")))
    assert not is_this_machine("192.0.2.7")
    some = [f"node{number}.invalid" for number in range(20)]
    assert those_of_this_machine(["localhost", *some, "here", "192.0.2.7"]) == {"localhost", "here"}
    assert not is_this_machine("an-alias-of-ssh.invalid")
    assert not is_this_machine("node1..site") and not is_this_machine("n" * 64)  # no names of the resolver's


def test_names_that_nobody_answers_for_are_looked_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, 350 take more than a minute."""
    together = threading.Barrier(20, timeout=20)

    def silent(*_: object, **__: object) -> NoReturn:
        together.wait()
        raise OSError

    monkeypatch.setattr("socket.getaddrinfo", silent)
    names = [f"silent{number}" for number in range(20)]
    assert those_of_this_machine(names) == set()
    assert those_of_this_machine(names) == set(), "and once"
