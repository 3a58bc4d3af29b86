"""Tables are found again by the worlds that they were made for, by all ranks alike, and ignored by others."""

import json
import re
import socket
import warnings

import numpy as np
import pytest
from raises import raises

from hpcdp import collectives
from hpcdp.collectives import algorithm_choice, blocks
from hpcdp.collectives.cost_model import ETHERNET, FABRIC, Topology
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError

INSIDE = algorithm_choice.Link(1e-6, 2e-10, 1e-10, ((4096, 3e-10, 2e-10), (1 << 20, 2e-10, 1e-10)))
MEASURED = algorithm_choice.MachineModel(
    INSIDE, FABRIC.across, 3e-11, 4e-11, 5e-6, 6e-7, 7e-6, ((1 << 20, 3e-11, 4e-11),)
)
CHOICES = {
    "allreduce": [[1023, "native"], [65536, "ring"], [None, "hierarchical"]],
    "broadcast": [[None, "native"]],
    "reduce": [[64, "tree"]],
}
ROW = {
    "nbytes": 4,
    "chosen": "tree",
    "median_us": {"native": 2.0, "tree": 1},
    "predicted_us": {"native": 2.0, "tree": 1.5},
    "gain": {"native": 1.0, "tree": 2.0},
    "wrong": {},
}


@pytest.fixture(autouse=True)
def tables(tmp_path, monkeypatch):
    """The folder of tables."""
    monkeypatch.setenv("HPCDP_TUNING_DIR", str(tmp_path))
    return tmp_path


def save(world):
    return algorithm_choice.save(world, algorithm_choice.make(world, MEASURED, CHOICES, {"reduce": [ROW]}))


def choose(world):
    sizes = (0, 4, 1023, 1024, 65536, 65537, 1 << 40)
    named = [algorithm_choice.choice(world, "allreduce", nbytes) for nbytes in sizes]
    return (
        named,
        algorithm_choice.choice(world, "reduce", 65),
        algorithm_choice.choice(world, "allgather", 4),
        algorithm_choice.machine(world),
    )


def quietly(ranks, fn, per_node=None):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return thread_comm.run(ranks, fn, per_node)


@pytest.mark.parametrize(("ranks", "per_node"), [(1, None), (3, None), (4, 2), (5, (3, 1, 1))])
def test_all_ranks_choose_what_the_saved_table_says(tables, ranks, per_node):
    (where,) = set(quietly(ranks, save, per_node))
    assert [where] == list(tables.iterdir())
    names = ["native", "native", "native", "ring", "ring", "hierarchical", "hierarchical"]
    assert quietly(ranks, choose, per_node) == [(names, None, None, MEASURED)] * ranks


def test_a_table_is_used_as_soon_as_it_is_saved():
    def before_and_after(world):
        first = algorithm_choice.choice(world, "allreduce", 4)
        save(world)
        return first, algorithm_choice.choice(world, "allreduce", 4)

    assert quietly(3, before_and_after) == [(None, "native")] * 3


def test_sizes_that_were_chosen_before_follow_the_table_that_is_saved():
    def rank(world):
        before = {call: _chosen_by(world, call) for call in ("allreduce", "iallreduce")}
        save(world)
        return before, {call: _chosen_by(world, call) for call in before}

    for before, after in thread_comm.run(2, rank):
        assert before == {"allreduce": "shared", "iallreduce": "shared"}
        assert after == {"allreduce": "ring", "iallreduce": "ring"}


def test_messages_move_blocks_as_the_saved_table_says(monkeypatch):
    """Without an entry for a collective or size, as the cost model says."""
    used = []
    for name, algorithm in blocks.ALGORITHMS.items():
        monkeypatch.setitem(
            blocks.ALGORITHMS, name, lambda *given, name=name, of=algorithm: used.append(name) or of(*given)
        )

    def moved(world):
        for nbytes in (4096, 1 << 20):  # shorter ones go along with the counts
            x = np.full((world.size, nbytes // world.size), world.rank, np.uint8)
            wanted = np.repeat(np.arange(world.size, dtype=np.uint8), nbytes // world.size)
            assert np.array_equal(collectives.alltoall(x, world=world).ravel(), wanted)
            assert np.array_equal(collectives.allgather(x[0], world=world).ravel(), wanted)

    def rank(world):
        moved(world)
        choices = {"alltoall": [[8192, "pairwise"], [None, "by_node"]]}
        algorithm_choice.save(world, algorithm_choice.make(world, MEASURED, choices, {}))
        moved(world)

    thread_comm.run(4, rank, 2)
    by_model, by_table = used[: len(used) // 2], used[len(used) // 2 :]
    assert sorted(by_model) == sorted(["by_node", "by_node_allgather", "pairwise", "ring"] * 4)
    assert sorted(by_table) == sorted(["pairwise", "bruck_allgather", "by_node", "ring"] * 4)


def _chosen_by(world, call):
    """The algorithm that `operations` keeps for 4 KB of float32."""
    request = getattr(collectives, call)(np.ones(1024, np.float32), world=world)
    if call == "iallreduce":
        request.wait()
    (found,) = [chosen for key, chosen in world.kept[algorithm_choice.CHOICES].items() if key[0] == call]
    return found.algorithm.name


@pytest.mark.parametrize(
    ("ranks", "per_node", "cores", "said"),
    [(2, None, 2, ""), (3, None, 2, "3 ranks share 2 cores"), (4, 1, 2, "4 ranks share 2 cores"), (4, 2, 4, "")],
)
def test_ranks_that_share_cores_are_told(monkeypatch, ranks, per_node, cores, said):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert thread_comm.run(ranks, algorithm_choice.crowded, per_node) == [said] * ranks


def test_other_topologies_have_tables_of_their_own(tables):
    shapes = [(4, None), (4, 2), (4, (3, 1)), (4, (1, 3)), (5, None)]
    paths = {thread_comm.run(ranks, save, per_node)[0] for ranks, per_node in shapes}
    assert len(paths) == len(shapes)
    assert quietly(3, choose)[0][0] == [None] * 7
    assert quietly(4, choose, (3, 1))[0][0][0] == "native"


def test_the_fingerprint_says_what_decides_and_names_no_host():
    (found, again), *_ = thread_comm.run(
        5, lambda w: (algorithm_choice.fingerprint(w), algorithm_choice.fingerprint(w)), (2, 3)
    )
    assert found is again
    assert found["ranks_per_node"] == [2, 3]
    assert found["library"] == "threads"
    assert found["processors"] == [algorithm_choice.processor_name()]
    assert found["machines"] == 1
    assert socket.gethostname() not in json.dumps({**found, "processors": []})


@pytest.mark.parametrize("cores", [2, 9])
def test_the_topology_is_that_of_the_nodes(monkeypatch, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert thread_comm.run(5, algorithm_choice.topology, (2, 3)) == [Topology((2, 3), crowded=cores < 5)] * 5


@pytest.mark.parametrize(("fabric", "assumed"), [(True, FABRIC), (False, ETHERNET)])
def test_links_are_assumed_by_the_kind_of_network(monkeypatch, fabric, assumed):
    monkeypatch.setattr(algorithm_choice, "_has_fabric", lambda: fabric)
    assert thread_comm.run(2, algorithm_choice.machine, 1) == [assumed] * 2
    assert thread_comm.run(2, lambda world: algorithm_choice.fingerprint(world)["network"])[0] == "none"


def changed(**parts):
    return lambda table: table | parts


def with_choices(choices):
    return changed(choices=choices)


def without(table, *names):
    return {name: value for name, value in table.items() if name not in names}


def with_machine(table, **parts):
    return table | {"machine": table["machine"] | parts}


BROKEN = [
    (changed(version=algorithm_choice.VERSION + 1), "its version is 3, not 2"),
    (lambda table: [table], "its version is None, not 2"),
    (lambda table: without(table, "fingerprint"), "no fingerprint"),
    (lambda table: without(table, "choices"), "no choices"),
    (
        lambda table: table | {"fingerprint": table["fingerprint"] | {"library": "MPICH 9"}},
        "library is 'MPICH 9', here",
    ),
    (lambda table: table | {"fingerprint": without(table["fingerprint"], "cores_per_node")}, "cores_per_node is None"),
    (lambda table: without(table, "machine"), "lacks seconds"),
    (lambda table: with_machine(table, wait_s=-1.0), "lacks seconds"),
    (lambda table: with_machine(table, across={"alpha_s": 1}), "lacks seconds"),
    (lambda table: with_machine(table, gamma_s_per_byte="fast"), "lacks seconds"),
    (with_choices({"gossip": []}), "unknown collective 'gossip', valid: allreduce, reduce_scatter"),
    (
        with_choices({"reduce": [[None, "butterfly"]]}),
        "unknown algorithm 'butterfly' of reduce, valid: reference, native",
    ),
    (with_choices({"reduce": "native"}), "choices of reduce are no list"),
    (with_choices({"reduce": [["native", None]]}), "choice 1 of reduce is"),
    (with_choices({"reduce": [[8, "native"], [8, "tree"]]}), "choice 2 of reduce is up to 8 bytes, after 8"),
    (with_choices({"reduce": [[None, "native"], [8, "tree"]]}), "choice 1 of reduce is up to None bytes"),
    (with_choices({"reduce": [[True, "native"]]}), "choice 1 of reduce is up to True bytes"),
    (changed(measured=7), "measured is 7, not rows by collective"),
    (lambda table: without(table, "measured"), "measured is None, not rows"),
    (changed(measured={"gossip": []}), "unknown collective 'gossip'"),
    (changed(measured={"reduce": {}}), "the measurements of reduce are no list"),
    (changed(measured={"reduce": [ROW, {"nbytes": 4}]}), "row 2 of the measurements of reduce lacks figures"),
    (changed(measured={"reduce": [ROW | {"chosen": ["tree"]}]}), "row 1 of"),
    (changed(measured={"reduce": [ROW | {"nbytes": "4"}]}), "row 1 of"),
    (changed(measured={"reduce": [ROW | {"median_us": {"tree": 1.0}}]}), "row 1 of"),
    (changed(measured={"reduce": [ROW | {"gain": {"tree": "twice"}}]}), "row 1 of"),
]


@pytest.mark.parametrize(("change", "says"), BROKEN, ids=[says[:40] for _, says in BROKEN])
def test_a_table_that_does_not_fit_is_ignored_in_one_line(change, says, capsys):
    where = thread_comm.run(3, save)[0]
    where.write_text(json.dumps(change(json.loads(where.read_text()))))
    ignored_in_one_line(where, says, capsys)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b'{"version": 1', b"[" * 100_000])
def test_a_broken_file_is_ignored_in_one_line(text, capsys):
    where = thread_comm.run(3, save)[0]
    where.write_bytes(text)
    ignored_in_one_line(where, "", capsys)


def ignored_in_one_line(where, says, capsys):
    capsys.readouterr()
    assert quietly(3, choose) == [([None] * 7, None, None, ETHERNET)] * 3
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert re.fullmatch(
        rf"hpcdp: tuning table {re.escape(str(where))} is ignored: .*; `hpcdp tune` writes a new one\n", err
    )


def test_a_folder_that_is_not_there_yet_has_no_table(tables, monkeypatch, capsys):
    monkeypatch.setenv("HPCDP_TUNING_DIR", str(tables / "elsewhere"))
    assert quietly(2, choose)[0][0] == [None] * 7
    assert capsys.readouterr().err == ""
    assert thread_comm.run(2, save)[0].parent == tables / "elsewhere"


def test_a_folder_that_is_a_file_is_told(tables, monkeypatch, capsys):
    (tables / "file").write_text("")
    monkeypatch.setenv("HPCDP_TUNING_DIR", str(tables / "file"))
    assert quietly(2, choose)[0][0] == [None] * 7
    assert "HPCDP_TUNING_DIR: expected a folder, got the file" in capsys.readouterr().err


def test_without_a_setting_tables_are_beside_the_kernels(tables, monkeypatch):
    monkeypatch.delenv("HPCDP_TUNING_DIR")
    monkeypatch.setenv("HPCDP_CACHE_DIR", str(tables / "cache"))
    assert algorithm_choice.folder() == tables / "cache" / "tuning"
    assert quietly(2, choose)[0][0] == [None] * 7


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(tables, monkeypatch):
    (tables / "file").write_text("")
    monkeypatch.setenv("HPCDP_TUNING_DIR", str(tables / "file"))

    def refused(world):
        with raises(ConfigError, operation="tuning table", remedy="HPCDP_TUNING_DIR"):
            save(world)
        return True

    assert all(thread_comm.run(3, refused))


def test_a_table_that_cannot_be_completed_leaves_the_old_one(tables, monkeypatch):
    where = thread_comm.run(2, save)[0]
    before = where.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(algorithm_choice.os, "fsync", full)
    with raises(ConfigError, operation="tuning table", where=where):
        thread_comm.run(2, save)
    assert where.read_bytes() == before
    assert list(tables.iterdir()) == [where]


def test_a_table_is_readable_json():
    where = thread_comm.run(2, save)[0]
    text = where.read_text()
    assert json.loads(text)["choices"] == CHOICES
    assert '    "broadcast": [[null, "native"]],\n' in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.mpi
def test_real_ranks_follow_the_table_of_rank_0(tables, monkeypatch):
    import hpcdp

    world = hpcdp.init()
    kept = {key: world.kept.pop(key) for key in ("tuning table", "tuning fingerprint") if key in world.kept}
    try:
        saved = save(world)
        world.kept.pop("tuning table")
        if world.rank:
            monkeypatch.setenv("HPCDP_TUNING_DIR", "/nowhere")
        assert algorithm_choice.choice(world, "allreduce", 4096) == "ring"
        assert algorithm_choice.machine(world) == MEASURED
        assert world.comm.allgather_json(str(saved)) == [str(saved)] * world.size
    finally:
        for key in ("tuning table", "tuning fingerprint"):
            world.kept.pop(key, None)
        world.kept.update(kept)
