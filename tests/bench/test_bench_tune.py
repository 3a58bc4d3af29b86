"""hpcdp tune: what it probes, how it chooses, what it saves, and what it refuses."""

import json
from dataclasses import asdict, replace

import pytest
from raises import raises

from hpcdp.bench import tune
from hpcdp.bench.tune import Effort
from hpcdp.collectives import ALGORITHMS, algorithm_choice
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError

SHORT = Effort((4, 16, 64, 4096), seconds=0.001, iterations=3)


@pytest.fixture(autouse=True)
def _short_probes(monkeypatch):
    monkeypatch.setattr(tune, "_SIZES", (4 << 10, 1 << 20))


@pytest.fixture
def links_are_known(monkeypatch):
    """Links are not measured: what is shown or saved is looked at, not the machine."""
    monkeypatch.setattr(tune, "probe", lambda world: algorithm_choice.ETHERNET)


@pytest.fixture(autouse=True)
def tables(tmp_path, monkeypatch):
    """The folder of tables."""
    monkeypatch.setenv("HPCDP_TUNING_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("gain", "incumbent", "wanted"),
    [
        ({"native": 1.0}, "ring", "native"),
        ({"native": 1.0, "ring": 1.07}, "native", "native"),
        ({"native": 1.0, "ring": 1.07}, "ring", "native"),
        ({"native": 1.0, "ring": 1.09}, "native", "ring"),
        ({"native": 1.0, "ring": 1.2, "tree": 1.22}, "ring", "ring"),
        ({"native": 1.0, "ring": 1.2, "tree": 1.22}, "native", "tree"),
        ({"native": 1.0, "ring": 1.2, "tree": 1.31}, "ring", "tree"),
        ({"native": 1.0, "ring": 1.07, "tree": 1.09}, "ring", "tree"),
        ({"native": 1.0, "tree": 1.5}, "ring", "tree"),
    ],
)
def test_an_algorithm_is_replaced_only_beyond_noise(gain, incumbent, wanted):
    assert tune.chosen(gain, incumbent) == wanted


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("NNN", [[None, "N"]]),
        ("RRR", [[None, "R"]]),
        ("NNR", [[(64 << 20) - 1, "N"], [None, "R"]]),
        ("RNN", [[4, "R"], [None, "N"]]),
        ("RNR", [[4, "R"], [(64 << 20) - 1, "N"], [None, "R"]]),
        ("RRT", [[16, "R"], [(64 << 20) - 1, "N"], [None, "T"]]),
        ("RTN", [[4, "R"], [15, "N"], [16, "T"], [None, "N"]]),
    ],
)
def test_between_sizes_that_disagree_the_library_runs(names, wanted):
    long = {"N": "native", "R": "ring", "T": "tree"}
    found = tune.entries([4, 16, 64 << 20], [long[name] for name in names])
    assert found == [[most, long[name]] for most, name in wanted]


@pytest.mark.parametrize(
    ("sizes", "names", "wanted"),
    [
        ((64, 4096), ("ring", "ring"), [[4096, "ring"]]),
        ((65, 4096), ("ring", "ring"), [[64, "auto"], [4096, "ring"]]),
        ((65536, 16 << 20), ("native", "ring"), [[65535, "auto"], [(16 << 20) - 1, "native"], [None, "ring"]]),
        ((65536, 1 << 20), ("ring", "native"), [[65535, "auto"], [65536, "ring"], [1 << 20, "native"]]),
        ((65536,), ("tree",), [[65535, "auto"], [65536, "tree"]]),
        ((16 << 20,), ("tree",), [[(16 << 20) - 1, "auto"], [None, "tree"]]),
    ],
)
def test_beyond_what_was_measured_nothing_is_claimed(sizes, names, wanted):
    assert tune.entries(sizes, names) == wanted


@pytest.mark.usefixtures("links_are_known")
def test_sizes_that_were_left_out_stay(tables, capsys):
    thread_comm.run(2, lambda world: tune.tune(world, SHORT, collectives=["reduce"]))
    (path,) = tables.iterdir()
    before = json.loads(path.read_text())["measured"]["reduce"]
    effort = Effort((64, 1 << 16), seconds=0.001, iterations=3)
    thread_comm.run(2, lambda world: tune.tune(world, effort, collectives=["reduce"]))
    table = json.loads(path.read_text())
    after = table["measured"]["reduce"]
    assert [row["nbytes"] for row in after] == [4, 16, 64, 4096, 1 << 16]
    assert [after[0], after[1], after[3]] == [before[0], before[1], before[3]]
    assert after[2]["median_us"] != before[2]["median_us"]
    assert table["choices"]["reduce"] == tune.entries(
        [row["nbytes"] for row in after], [row["chosen"] for row in after]
    )
    capsys.readouterr()
    answers = thread_comm.run(2, lambda world: (algorithm_choice.choice(world, "reduce", 1 << 16), tune.show(world)))
    assert answers == [(after[-1]["chosen"], None)] * 2
    assert thread_comm.run(2, lambda world: algorithm_choice.choice(world, "reduce", 1 << 17)) == [None, None]
    shown = capsys.readouterr().out.replace("\n#   ", " ")  # where a line is wrapped depends on the choices
    assert "to 64K, the model's choice above" in shown


@pytest.mark.usefixtures("links_are_known")
@pytest.mark.parametrize("measured", [7, {"reduce": [{"nbytes": 4}]}])
def test_a_table_with_malformed_rows_is_told_once_and_written_anew(tables, capsys, measured):
    thread_comm.run(2, lambda world: tune.tune(world, SHORT, collectives=["reduce"]))
    (path,) = tables.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"measured": measured}))

    def refused(world):
        with raises(ConfigError, operation="tune --show"):
            tune.show(world)
        return True

    capsys.readouterr()
    assert all(thread_comm.run(2, refused))
    assert capsys.readouterr().err.count("is ignored:") == 1
    assert thread_comm.run(2, lambda world: tune.tune(world, SHORT, collectives=["broadcast"])) == [0, 0]
    assert set(json.loads(path.read_text())["measured"]) == {"broadcast"}


def test_help_fits_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, tune.parser().format_help().splitlines())) <= 80


def test_where_ranks_share_cores_nothing_is_predicted(tables, monkeypatch, capsys):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert thread_comm.run(2, lambda world: tune.tune(world, SHORT, collectives=["reduce"])) == [0, 0]
    lines = capsys.readouterr().out.splitlines()
    assert "# no predictions: 2 ranks share 1 core, but the model assumes a core per rank" in lines
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    assert len(rows) == 4 and all(row[3] == row[5] == "-" for row in rows)
    assert thread_comm.run(2, lambda world: algorithm_choice.choice(world, "reduce", 4)) == [rows[0][1]] * 2


@pytest.mark.parametrize(
    ("ranks", "per_node"), [pytest.param(2, None, marks=pytest.mark.thorough), (3, (2, 1)), (2, 1)]
)
def test_what_was_tuned_is_saved_and_followed(tables, monkeypatch, capsys, ranks, per_node):
    monkeypatch.setattr(algorithm_choice, "crowded", lambda world: "")
    assert thread_comm.run(ranks, lambda world: tune.tune(world, SHORT), per_node) == [0] * ranks
    (where,) = tables.iterdir()
    table = json.loads(where.read_text())
    assert f"# saved in {where}" in capsys.readouterr().out
    assert set(table["choices"]) == set(table["measured"]) == set(algorithm_choice.TUNED if per_node else ALGORITHMS)
    for collective, rows in table["measured"].items():
        by_node = {"by_node", "by_node_allgather"}
        impossible = {"shared"} if per_node == (2, 1) else {"shared", *by_node} if per_node else set()
        usable = set(algorithm_choice.algorithms_of(collective)) - impossible
        baseline = algorithm_choice.baseline_of(collective)
        assert len({row["nbytes"] for row in rows}) == len(rows)
        for row in rows:
            assert set(row["median_us"]) == set(row["predicted_us"]) == usable
            assert min(row["median_us"].values()) > 0
            assert min(row["predicted_us"].values()) > 0
            assert row["gain"][baseline] == 1.0
            assert "reference" not in row["gain"]
            assert row["chosen"] == baseline or row["gain"][row["chosen"]] >= tune.GAIN
            assert not any(row["wrong"].values())

    def follows(world):
        found = {
            (each, row["nbytes"]): algorithm_choice.choice(world, each, row["nbytes"]) for each, row in measured(table)
        }
        return found, json.loads(json.dumps(asdict(algorithm_choice.machine(world))))

    wanted = {(collective, row["nbytes"]): row["chosen"] for collective, row in measured(table)}
    assert thread_comm.run(ranks, follows, per_node) == [(wanted, table["machine"])] * ranks


def measured(table):
    return [(collective, row) for collective, rows in table["measured"].items() for row in rows]


@pytest.mark.usefixtures("links_are_known")
def test_a_dry_run_shows_predictions_in_80_columns_and_saves_nothing(tables, capsys):
    thread_comm.run(2, lambda world: tune.tune(world, SHORT, dry_run=True))
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index(tune.heading("native")) : lines.index(tune.heading("native")) + 5]
    assert [line.split()[0] for line in table] == ["#", "4", "16", "64", "4K"]
    assert all(len(line.split()) == 7 for line in table[1:])
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "# nothing is saved"
    assert not list(tables.iterdir())


@pytest.mark.usefixtures("links_are_known")
def test_a_wrong_result_is_told_and_never_chosen(tables, monkeypatch, capsys):
    algorithm = ALGORITHMS["broadcast"]["tree"]

    def forgetful(x, *given):
        yield from algorithm.steps(x, *given)
        x[-1:] = -1

    monkeypatch.setitem(ALGORITHMS["broadcast"], "tree", replace(algorithm, steps=forgetful, blocking=None))
    assert thread_comm.run(2, lambda world: tune.tune(world, SHORT)) == [1, 1]
    assert not list(tables.iterdir())
    text = capsys.readouterr().out
    assert "WRONG" in text.splitlines()[-1]
    broadcasts = text.partition("# broadcast")[2].partition("# reduce")[0].splitlines()[2:6]
    assert all("tree" not in line.split()[1] and "WRONG" in line for line in broadcasts)


def shows_what_was_printed(capsys):
    """To ranks whom the saved table fits, and nothing to others."""
    printed = capsys.readouterr().out
    thread_comm.run(2, tune.show)
    shown = capsys.readouterr().out
    for line in printed.splitlines():
        if line[:1].isdigit():
            assert line in shown
    assert "# ranks per node: 2\n" in shown
    assert shown.count("# auto: ") == len(ALGORITHMS)

    def refused(world):
        with raises(ConfigError, operation="tune --show"):
            tune.show(world)
        return True

    assert all(thread_comm.run(3, refused))


@pytest.mark.usefixtures("links_are_known")
def test_what_was_saved_is_shown_and_that_of_other_collectives_stays(tables, capsys):
    thread_comm.run(2, lambda world: tune.tune(world, SHORT))
    shows_what_was_printed(capsys)
    (path,) = tables.iterdir()
    before = json.loads(path.read_text())
    assert thread_comm.run(2, lambda world: tune.tune(world, SHORT, collectives=["reduce"])) == [0, 0]
    printed = capsys.readouterr().out
    assert "# reduce:" in printed
    assert "# allreduce:" not in printed
    after = json.loads(path.read_text())
    assert after["measured"]["reduce"] != before["measured"]["reduce"]
    for collective in set(ALGORITHMS) - {"reduce"}:
        assert after["measured"][collective] == before["measured"][collective]
        assert after["choices"][collective] == before["choices"][collective]


def test_an_unknown_collective_is_told_with_the_valid_ones():
    with raises(ConfigError, operation="tune", where="collective", got="alreduce"):
        tune.main(["alreduce"])


@pytest.mark.parametrize(
    ("sizes", "per_node"),
    [
        (2, None),
        (2, 1),
        (5, (2, 2, 1)),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((5, None), (4, 2))),
    ],
)
def test_links_are_measured_on_any_nodes(sizes, per_node):
    found = thread_comm.run(sizes, tune.probe, per_node)
    assert found == [found[0]] * sizes
    machine = found[0]
    if per_node != 1:
        assert 0 < machine.inside.alpha_s < 0.1
        assert machine.inside.shared_s_per_byte <= machine.inside.beta_s_per_byte
    if per_node is None:
        assert machine.across == algorithm_choice.ETHERNET.across
    else:
        assert 0 < machine.across.alpha_s < 0.1
        assert machine.across != algorithm_choice.ETHERNET.across
    for name in ("copy_s_per_byte", "gamma_s_per_byte", "message_s", "wait_s", "call_s"):
        assert 0 < getattr(machine, name) < 0.1
    assert len(tune.describe(machine, per_node is not None)) == (4 if per_node is not None else 3)


@pytest.mark.parametrize(
    ("argv", "fields"),
    [
        (["-m", "64:4"], {"operation": "size range", "expected": "MIN <= MAX", "got": "64:4"}),
        (["-m", "2:64"], {"operation": "tune -m", "expected": 4, "got": "2:64"}),
        (["fast"], {"where": "collective", "expected": "allreduce", "got": "'fast'"}),
        (["--dry-run", "--show"], {"remedy": "hpcdp tune -h"}),
        (["--slow"], {"remedy": "hpcdp tune -h"}),
    ],
)
def test_wrong_usage_is_one_line(argv, fields):
    with raises(ConfigError, **fields) as error:
        tune.main(argv)
    assert "\n" not in str(error.value)


def test_a_world_of_one_and_too_little_memory_are_refused():
    with raises(ConfigError, operation="tune", expected=2, got=1, remedy=["-n", 2]):
        thread_comm.run(1, lambda world: tune.tune(world, SHORT))
    with raises(ConfigError, operation="tune -m", expected="MiB"):
        thread_comm.run(2, lambda world: tune.tune(world, Effort((1 << 50,))))


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(tables, monkeypatch, capsys):
    (tables / "file").write_text("")
    monkeypatch.setenv("HPCDP_TUNING_DIR", str(tables / "file" / "folder"))

    def refused(world):
        with raises(ConfigError, operation="tuning table", remedy="HPCDP_TUNING_DIR"):
            tune.tune(world, SHORT)
        return True

    assert all(thread_comm.run(2, refused))
    assert capsys.readouterr().out == ""


@pytest.mark.thorough  # thread ranks tune in other tests
@pytest.mark.mpi
def test_real_ranks_tune(tables, capsys):
    import hpcdp

    world = hpcdp.init()
    if world.size != 2:  # more than there are cores take long for every algorithm; threads do it with three
        return
    kept = {key: world.kept.pop(key) for key in ("tuning table", "tuning fingerprint") if key in world.kept}
    try:
        collectives = ["allreduce", "broadcast"]  # threads tune all
        assert tune.tune(world, replace(SHORT, sizes=(4, 4096)), collectives=collectives) == 0
        assert [*algorithm_choice.loaded(world)["choices"]] == collectives
        assert bool(list(tables.iterdir())) == (world.rank == 0)
    finally:
        for key in ("tuning table", "tuning fingerprint"):
            world.kept.pop(key, None)
        world.kept.update(kept)
