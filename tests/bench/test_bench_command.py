"""``hpcdp bench`` over thread ranks: its tables, its files, and that wrong results are seen."""

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raises import raises

from hpcdp import collectives
from hpcdp.bench import command, communication, measure, tune
from hpcdp.bench.measure import Series
from hpcdp.collectives import cost_model
from hpcdp.collectives.algorithm_choice import Algorithm
from hpcdp.collectives.cost_model import ETHERNET, FABRIC, Link, Topology
from hpcdp.comm import World, thread_comm
from hpcdp.comm.progress import run_until_complete
from hpcdp.core.arrays import dtype_of
from hpcdp.errors import ConfigError

QUICK = ("-i", "3", "-x", "1")
BLOCKING = [name for name in command.COLLECTIVES if name not in ("iallreduce", *command.BLOCKS)]


@pytest.fixture(autouse=True)
def _short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_SIZES", (4 << 10, 1 << 20))


@pytest.fixture(autouse=True)
def _no_tuning_table(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HPCDP_TUNING_DIR", str(tmp_path_factory.mktemp("tuning")))


def bench(ranks: int, *arguments: str) -> list[int]:
    """The exit status of every rank."""
    settings = command.parse([*arguments, *QUICK])
    return thread_comm.run(ranks, lambda world: command.run(settings, world))


OSU_COLUMNS = {
    "latency": "# Size       Avg Latency(us)",
    "pt2pt": "# Size       Avg Latency(us)",
    "bandwidth": "# Size      Bandwidth (MB/s)",
    "bibandwidth": "# Size      Bandwidth (MB/s)",
    "multi_pair": "# Size                  MB/s        Messages/s",
    **dict.fromkeys([*BLOCKING, *command.BLOCKS], "# Size       Avg Latency(us)"),
    "iallreduce": "# Size           Overall(us)       Compute(us)    Pure Comm.(us)        Overlap(%)",
}
OSU_TITLES = {
    "latency": "Latency",
    "bandwidth": "Bandwidth",
    "bibandwidth": "Bi-Directional Bandwidth",
    "multi_pair": "Multiple Bandwidth / Message Rate",
    "allreduce": "Allreduce Latency",
    "iallreduce": "Non-blocking Allreduce Latency",
    "reduce_scatter": "Reduce_scatter Latency",
    "allgather": "Allgather Latency",
    "broadcast": "Broadcast Latency",
    "reduce": "Reduce Latency",
    "pt2pt": "Latency",
    "allgatherv": "Allgatherv Latency",
    "alltoall": "All-to-All Personalized Exchange Latency",
    "gather": "Gather Latency",
    "scatter": "Scatter Latency",
}


@pytest.mark.parametrize(
    ("name", "known_as"), [("mbw_mr", "multi_pair"), ("osu_bw", "bandwidth"), ("bcast", "broadcast")]
)
def test_names_of_osu_are_taken(name: str, known_as: str) -> None:
    assert command.parse([name, "-m", "8"]).benchmark == known_as


@pytest.mark.each_value
@pytest.mark.parametrize("given", [[], ["-c"]])
@pytest.mark.parametrize("name", OSU_COLUMNS)
def test_osu_columns(name: str, given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(4, name, "-m", "8:80", "--factor", "10", *given) == [0] * 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ""
    assert lines[1] == f"# OSU MPI {OSU_TITLES[name]} Test v7.4"
    assert re.fullmatch(r"# Measured by hpcdp [\d.]+, printed in the format of OSU Micro-Benchmarks\.", lines[2])
    assert ("# [ pairs: 2 ] [ window size: 64 ]" in lines) == (name == "multi_pair")
    assert f"# Datatype: {'MPI_CHAR' if name in command.PAIRS else 'MPI_FLOAT'}." in lines
    assert all(line.startswith("#") or not line for line in lines[1:-2])
    columns = len(re.split(r"\s{2,}", OSU_COLUMNS[name])) - 1
    width = 18
    assert lines[-3] == OSU_COLUMNS[name] if not given else lines[-3].endswith(f"{'Validation':>{width}}")
    for line, nbytes in zip(lines[-2:], (8, 80), strict=True):
        values = rf"[ \d]{{{width - 3}}}\.\d\d" * columns + f"{'Pass':>{width}}" * len(given)
        assert re.fullmatch(rf"{nbytes:<10}{values}", line)


def test_osu_full_columns(capsys: pytest.CaptureFixture[str]) -> None:
    bench(2, "allreduce", "-m", "64", "--full", "-c", "0")
    heading, *_, last = [line for line in capsys.readouterr().out.splitlines() if not re.match("#[^S]* [^S]", line)][1:]
    assert heading == "# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations"
    nbytes, avg, least, most, iterations = last.split()
    assert (nbytes, iterations) == ("64", "3") and float(least) <= float(avg) <= float(most)
    assert len(last) == len(heading)
    bench(2, "iallreduce", "-m", "4:4", "-f", "-t", "5")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4:-2] == ["# Overall = Coll. Init + Compute + MPI_Test + MPI_Wait", ""]
    assert re.split(r"\s{2,}", lines[-2]) == [
        "# Size", "Overall(us)", "Compute(us)", "Coll. Init(us)", "MPI_Test(us)", "MPI_Wait(us)", "Pure Comm.(us)",
        "Min Comm.(us)", "Max Comm.(us)", "Overlap(%)",
    ]  # fmt: skip
    overall, compute, init, test, wait, pure, least, most, overlap = map(float, lines[-1].split()[1:])
    assert overall == pytest.approx(compute + init + test + wait, rel=0.1)
    assert least <= pure <= most and test > 0 and 0 <= overlap <= 100


def test_predictions_stand_behind_osu_s_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune.algorithm_choice, "crowded", lambda world: "")
    monkeypatch.setattr(tune, "probe", lambda world: ETHERNET)
    bench(2, "allreduce", "-m", "64:64", "-f", "-c", "--predict")
    *_, heading, line = capsys.readouterr().out.splitlines()
    assert heading.endswith("  Iterations        Validation     Predicted(us)") and len(line) == len(heading)


def test_options_have_osu_s_names() -> None:
    long = "--message-size 4:64 --iterations 5 --warmup 2 --full --validation --type mpi_int --accelerator cpu"
    given = f"reduce {long} --window-size 3 --num-test-calls 7 --mem-limit 32 --root-rank 1 --in-place"
    short = "reduce -m 4:64 -i 5 -x 2 -f -c -T mpi_int -d cpu -W 3 -t 7 -M 32 -k 1 -l"
    settings = command.parse(given.split())
    assert settings == command.parse(short.split())
    assert settings.sizes == (4, 8, 16, 32) and settings.root == 1
    assert (settings.iterations, settings.warmup, settings.window, settings.tests) == (5, 2, 3, 7)


@pytest.mark.parametrize("name", command.ROOTED)
def test_any_rank_may_be_the_root(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(3, name, "-m", "64:64", "-k", "2") == [0] * 3
    assert ", root: 2" in capsys.readouterr().out


def test_a_mean_of_integers_is_validated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LIMIT_NBYTES", 1 << 20)
    plot = ["--plot", str(tmp_path / "curve.png")]
    assert bench(3, "allreduce", "-m", "64:64", "-T", "int8", "--op", "mean", *plot) == [0] * 3


NCCL_HEADING = """\
#
#                                                              out-of-place                      in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""


@pytest.mark.parametrize("name", BLOCKING)
def test_nccl_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(3, name, "--style", "nccl", "-m", "16K:16K", "-T", "float16") == [0] * 3
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert NCCL_HEADING in printed
    total = 3 * 16384 if name in ("allgather", *command.BLOCKS) else 16384
    op = "sum" if "reduce" in name else "none"
    root = 0 if name in command.ROOTED else -1
    only_one = name in ("broadcast", *command.BLOCKS)
    (line,) = [line for line in lines if not line.startswith("#")]
    assert line.startswith(f"{total:>12}{8192:>14}{'half':>10}{op:>8}{root:>8}")
    out_of_place, in_place = line.split()[5:9], line.split()[9:13]
    assert in_place[3] == "0" and out_of_place[3] == ("N/A" if only_one else "0")
    if not only_one:
        us, algbw, _busbw = map(float, out_of_place[:3])
        assert algbw == pytest.approx(total / us / 1e3, abs=0.006)
    assert lines[-3] == "# Out of bounds values : 0 OK"
    average = float(lines[-2].removeprefix("# Avg bus bandwidth    : "))
    measured = [float(each[2]) for each in (out_of_place, in_place) if each[2] != "N/A"]
    assert average == pytest.approx(np.mean(measured), abs=0.006)


NARROW = [
    ("allreduce", "--style", "nccl", "--predict"),
    ("broadcast", "--style", "nccl"),
    ("allreduce", "-f", "-c", "--predict"),
    ("iallreduce", "-f", "-c", "--predict"),
    ("multi_pair", "-f", "-c", "--predict"),
]


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(each, marks=pytest.mark.thorough if each in NARROW[1:4] else ()) for each in NARROW],
    ids=" ".join,
)
def test_a_table_fits_a_terminal(arguments: tuple[str, ...], monkeypatch, capsys) -> None:
    given = (*arguments, "-m", "4K:64K", "--factor", "16")
    assert bench(2, *given) == [0, 0]
    in_a_file = capsys.readouterr().out
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert bench(2, *given) == [0, 0]
    on_a_terminal = capsys.readouterr().out
    assert max(map(len, in_a_file.splitlines())) > 80 >= max(map(len, on_a_terminal.splitlines()))
    numbers = [len(re.sub("^#.*", "", text, flags=re.M).split()) for text in (in_a_file, on_a_terminal)]
    constants = 4 if "nccl" in arguments else 0  # count, type, redop, root of each size are in the heading
    assert numbers[0] == numbers[1] + 2 * constants


@pytest.mark.parametrize("name", BLOCKING)
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_algorithm_is_right(name: str, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    for algorithm in collectives.ALGORITHMS[name]:
        given = (name, "--algorithm", algorithm, "--style", "nccl", "-m", "4:100K", "--factor", "160")
        assert bench(ranks, *given) == [0] * ranks, algorithm
    assert "FAILED" not in capsys.readouterr().out


def _forgetful(name: str) -> Algorithm:
    """The reference, which overwrites the last element of rank 1's result."""
    right = collectives.ALGORITHMS[name]["reference"]

    def blocking(*arguments: object) -> None:
        *given, world = arguments
        run_until_complete(right.steps(*given, world, 1))
        result = given[1] if name == "reduce_scatter" else given[0]
        if world.rank == (0 if name == "reduce" else 1):  # type: ignore[attr-defined]
            result[-1] += 1  # type: ignore[index]

    return replace(right, blocking=blocking)


@pytest.mark.parametrize("style", command.STYLES)
@pytest.mark.parametrize("name", BLOCKING)
def test_a_wrong_algorithm_fails(
    name: str, style: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(collectives.ALGORITHMS[name], "reference", _forgetful(name))
    given = (name, "--algorithm", "reference", "--style", style, "-m", "64:64")
    assert bench(2, *given, *(["-c"] if style == "osu" else [])) == [1, 1]
    printed, errors = capsys.readouterr()
    assert ("FAILED" if style == "nccl" else "Fail") in printed and "Pass" not in printed
    assert errors == f"hpcdp bench: {name}: wrong results at 64\n"
    assert bench(2, *given, "-c", "0") == [0, 0]


@pytest.mark.parametrize("name", command.BLOCKS)
def test_blocks_are_right_and_wrong_ones_fail(name: str, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    for ranks in (1, 3):
        assert bench(ranks, name, "-c", "-m", "4:100K", "--factor", "160") == [0] * ranks
    assert "Fail" not in capsys.readouterr().out
    function = "allgather" if name == "allgatherv" else name
    honest = getattr(communication.collectives, function)

    def stale(x: Any, *given: Any, **named: Any) -> Any:
        return honest(None if x is None else x * 0, *given, **named)

    monkeypatch.setattr(communication.collectives, function, stale)
    assert bench(2, name, "-c", "-m", "64:64") == [1, 1]


def test_a_nonblocking_one_that_is_not_waited_for_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def wait(self) -> None: ...

    monkeypatch.setattr(communication.collectives, "iallreduce", lambda *_: Nothing())
    assert bench(2, "iallreduce", "-m", "64:64") == [1, 1]


@pytest.mark.parametrize("name", command.PAIRS)
def test_lost_messages_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = communication.public_messages if name == "pt2pt" else communication.own_messages

    def stale(world: World) -> communication.PairMessages:
        ways = honest(world)
        return communication.PairMessages(lambda x, to: ways.send(x * 0, to), ways.receive, ways.finish)

    monkeypatch.setattr(communication, honest.__name__, stale)
    assert 1 in bench(2, name, "-m", "64:64")


def test_bandwidth_of_both_ways_is_that_of_the_slower_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(candidates: list[Any], *_: Any) -> dict[str, Series]:
        return {"own": Series([4000 if candidates[0].rank else 1000], 1)}

    monkeypatch.setattr(communication, "alternate", timed)

    def mb_s(pattern: str) -> tuple[float, float]:
        how = communication.PairSweep(pattern, np.dtype(np.int8), window=2)
        (row,) = thread_comm.run(3, lambda world: list(communication.sweep_pairs(how, [1000], world)))[0]
        return row["mb_s"], row["median_mb_s"]

    assert mb_s("bandwidth") == pytest.approx((2000, 2000))
    assert mb_s("bibandwidth") == pytest.approx((1000, 1000))


def test_the_limit_of_a_plot_is_a_link_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = command.parse(["allreduce", "--plot", "curve.png"])
    monkeypatch.setattr(tune, "_LINK_REPEATS", 1)

    def rank(world: World) -> bool:
        name, rate = command._limit(settings, world)
        assert name == "point to point between nodes" and rate > 0
        return world.comm.traffic.nbytes > 1 << 20  # type: ignore[attr-defined]

    assert thread_comm.run(4, rank, (3, 1)) == [True, False, False, True]  # and not 0 and 2, on one node


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_without_a_partner_wait(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(ranks, "latency", "-m", "4:16") == [0] * ranks
    assert f"# Ranks 0 and {ranks // 2}." in capsys.readouterr().out


@pytest.mark.thorough
def test_a_file_that_fails_is_told_and_the_others_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LIMIT_NBYTES", 1 << 20)
    report, plot = tmp_path / "result.json", tmp_path / "curve.png"
    settings = command.parse(
        ["allreduce", "-m", "4:16", *QUICK, "--csv", "/dev/full", "--json", str(report), "--plot", str(plot)]
    )

    def rank(world: World) -> str:
        with pytest.raises(ConfigError) as caught:
            command.run(settings, world)
        return str(caught.value)

    for said in thread_comm.run(2, rank):
        assert said == "bench: write [/dev/full]: expected a file that can be written, got no space left on device"
    assert len(json.loads(report.read_text())["rows"]) == 3
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(tmp_path.iterdir()) == [plot, report]


def test_files(tmp_path: Path) -> None:
    paths = {kind: str(tmp_path / f"result.{kind}") for kind in ("csv", "json")}
    bench(2, "allgather", "--style", "nccl", "-m", "16:64", "--csv", paths["csv"], "--json", paths["json"])
    report = json.loads(Path(paths["json"]).read_text())
    assert report["machine"]["ranks_per_node"] == 2
    assert {"commit", "date", "versions", "processor"} <= set(report["machine"])
    assert (report["benchmark"], report["dtype"], report["limit"]) == ("allgather", "float32", None)
    with open(paths["csv"], newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(report["rows"]) == 3
    for line, row in zip(lines, report["rows"], strict=True):
        assert int(line["total_nbytes"]) == 2 * int(line["nbytes"]) == row["total_nbytes"]
        assert float(line["avg"]) == row["avg"]
        assert float(line["out_of_place_busbw_gb_s"]) == row["out_of_place"]["busbw_gb_s"]
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] / 2)


@pytest.mark.parametrize(
    "name",
    [
        "allreduce",
        "bibandwidth",
        *(pytest.param(each, marks=pytest.mark.thorough) for each in ("latency", "iallreduce")),
    ],
)
def test_plot(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LIMIT_NBYTES", 1 << 20)
    path = tmp_path / "curve.png"
    assert bench(2, name, "-m", "4:4K", "--factor", "4", "--plot", str(path)) == [0, 0]
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("name", "turns"), [("allreduce", 12), ("iallreduce", 12), ("latency", 12), ("bandwidth", 7)])
@pytest.mark.thorough
def test_a_plot_compares_turn_by_turn(name: str, turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LIMIT_NBYTES", 1 << 20)
    monkeypatch.setattr(communication, "library_messages", communication.own_messages)
    together = []

    def seen(candidates: list[Any], *rest: Any) -> Any:
        together.append(len({each.name for each in candidates}))
        return measure.alternate(candidates, *rest)

    monkeypatch.setattr(communication, "alternate", seen)
    monkeypatch.setattr(communication, "alternate", seen)
    report = tmp_path / "report.json"
    given = [name, "-m", "4K:16K", "--factor", "4", "-i", str(turns), "-x", "1", "--json", str(report)]
    settings = command.parse([*given, "--plot", str(tmp_path / "curve.png")])
    assert thread_comm.run(2, lambda world: command.run(settings, world)) == [0, 0]
    assert together == [2] * (8 if name == "iallreduce" else 4)  # alone, and beside computing
    for row in json.loads(report.read_text())["rows"]:
        assert row["iterations"] == row["library"]["iterations"] == turns
        assert row["wrong"] == row["library"]["wrong"] == 0


@pytest.mark.parametrize("name", command.BENCHMARKS)
def test_predictions_stand_beside(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune.algorithm_choice, "crowded", lambda world: "")
    if name not in ("latency", "allreduce"):  # one of messages and one collective measure links, as all would
        monkeypatch.setattr(tune, "probe", lambda world: ETHERNET)
    report = tmp_path / "report.json"
    assert bench(2, name, "-m", "4K:1M", "--factor", "256", "--predict", "--json", str(report)) == [0] * 2
    lines = capsys.readouterr().out.splitlines()
    rate = name in ("bandwidth", "bibandwidth", "multi_pair")
    key = "predicted_mb_s" if rate else "predicted_us"
    assert "# Predicted for links and cores as measured now; hpcdp tune saves them." in lines
    small, large = json.loads(report.read_text())["rows"]
    for line, row in zip(lines[-2:], (small, large), strict=True):
        assert float(line.split()[-1]) == pytest.approx(row[key], rel=1e-2)
    assert 0 < small[key] < large[key]


def test_a_rank_alone_gets_no_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(1, "allreduce", "-m", "64:64", "--predict") == [0]
    printed = capsys.readouterr().out
    assert "# No predictions for a single rank.\n" in printed and "Predicted(us)" not in printed


def test_ranks_that_share_cores_get_no_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    report = tmp_path / "report.json"
    assert bench(2, "allreduce", "-m", "64:64", "--predict", "--json", str(report)) == [0, 0]
    printed = capsys.readouterr().out
    assert "# No predictions: 2 ranks share 1 core, but the model assumes a core per rank.\n" in printed
    assert "Predicted(us)" not in printed
    (row,) = json.loads(report.read_text())["rows"]
    assert "predicted_us" not in row


def test_predictions_are_those_of_the_model_and_the_chosen_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune.algorithm_choice, "crowded", lambda world: "")
    monkeypatch.setattr(tune, "probe", lambda world: FABRIC)

    def rank(world: World) -> dict[str, float]:
        found = {}
        for algorithm in ("auto", "shared", "ring"):
            settings = command.parse(["allreduce", "-m", "1M:1M", "--algorithm", algorithm])
            predicted, _ = tune.predictor(settings, world)
            assert predicted is not None
            found |= {algorithm: predicted({"nbytes": 1 << 20, "total_nbytes": 1 << 20})["predicted_us"]}
        return found

    found = thread_comm.run(2, rank)[0]
    on = Topology((2,))
    assert found["auto"] == found["shared"] == 1e6 * cost_model.predicted_s("allreduce", "shared", 1 << 20, on, FABRIC)
    assert found["ring"] == 1e6 * cost_model.predicted_s("allreduce", "ring", 1 << 20, on, FABRIC)


def test_predictions_of_messages_are_those_of_the_link_between_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {"inside": Link(1e-6, 2e-10, 1e-10), "across": Link(20e-6, 1e-9, 1e-9)}
    monkeypatch.setattr(tune.algorithm_choice, "crowded", lambda world: "")
    monkeypatch.setattr(tune, "probe", lambda world: replace(ETHERNET, call_s=4e-6, **links))

    def rank(world: World) -> list[float]:
        found = []
        for name in ("latency", "bandwidth", "bibandwidth", "multi_pair"):
            predicted, _ = tune.predictor(command.parse([name, "-W", "1000000"]), world)
            assert predicted is not None
            found += predicted({"nbytes": 10**6}).values()
        return found

    assert thread_comm.run(4, rank)[0] == pytest.approx([203, 1e6 / 101, 1e6 / 101, 2e6 / 201], rel=1e-3)
    assert thread_comm.run(4, rank, 2)[0] == pytest.approx([1022, 1e3, 2e3, 1e3], rel=1e-3)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ("4:64", [4, 8, 16, 32, 64]),
        ("16", [4, 8, 16]),
        ("16M:", [16 << 20, 32 << 20, 64 << 20]),
        ("6:50", [4, 12, 24, 48]),
    ],
)
def test_sizes_as_osu_takes_them(given: str, sizes: list[int]) -> None:
    assert list(command.parse(["allreduce", "-m", given]).sizes) == sizes


def test_dtypes_as_osu_names_them() -> None:
    assert command.parse(["latency"]).dtype == "int8"
    assert command.parse(["allreduce"]).dtype == "float32"
    assert command.parse(["allreduce", "-T", "mpi_int"]).dtype == "int32"


@pytest.mark.parametrize(
    ("ranks", "given", "says"),
    [
        (1, ["latency"], "bench latency: expected 2 ranks or more, got 1; start it with hpcdp launch -n 2"),
        (3, ["multi_pair"], "expected an even number of ranks, got 3"),
        (1, ["allreduce", "--plot", "x.png"], "--plot: expected 2 ranks or more"),
        (
            1,
            ["allreduce", "--algorithm", "rng"],
            "unknown allreduce algorithm 'rng'; did you mean 'ring'? valid: ",
        ),
        (1, ["broadcast", "--algorithm", "ring"], "unknown broadcast algorithm 'ring'; valid: auto, "),
        (1, ["reduce", "--op", "summ"], "unknown op 'summ'; did you mean 'sum'? valid: sum, mean, min, max, prod"),
        (2, ["broadcast", "-k", "2"], "bench --root-rank: expected a rank from 0 to 1, got 2"),
        (
            2,
            ["allreduce", "-k", "1"],
            "--root-rank: expected one of broadcast, reduce, gather, scatter, got 1",
        ),
        (2, ["allreduce", "-M", "2"], "bench --mem-limit: expected 4 bytes or more, got 2"),
        (2, ["allreduce", "-m", "1G:512G"], "expected messages that fit into the "),
        (
            2,
            ["allreduce", "--csv", "/nowhere/x.csv"],
            "bench [/nowhere/x.csv]: expected a file that can be written, got no folder /nowhere",
        ),
        (2, ["allreduce", "--json", "."], "bench [.]: expected a file that can be written, got a folder"),
        (2, ["allreduce", "--json", "/proc/x.json"], "bench [/proc/x.json]: expected a file that can be written, got "),
        (2, ["allreduce", "--plot", f"{'x' * 300}.png"], "can be written, got a name that is too long"),
        (1, ["allreduc"], "unknown benchmark 'allreduc'; did you mean 'allreduce'? valid: latency, "),
        (1, ["allreduce", "--style", "ncl"], "unknown style 'ncl'; did you mean 'nccl'? valid: osu, nccl"),
        (1, ["latency", "--style", "nccl"], "--style nccl: expected allreduce, reduce_scatter, allgather"),
        (1, ["allreduce", "-d", "cuda"], "unknown device 'cuda'; valid: cpu"),
        (1, ["allreduce", "-T", "flaot32"], "unknown dtype 'flaot32'; did you mean 'float32'? valid: float32, "),
        (1, ["allreduce", "-m", "8:4"], "expected MIN:MAX with 0 < MIN <= MAX, e.g. 4:64M, got '8:4'"),
        (1, ["allreduce", "-m", "4X"], "expected a number with K, M or G, e.g. 64K, got '4X'"),
        (1, ["allreduce", "--factor", "1"], "factor: expected an integer from 2 to"),
        (1, ["allreduce", "-i", "0"], "iterations: expected an integer from 1 to"),
        (
            1,
            ["latency", "--op", "max"],
            "bench latency --op: expected one of allreduce, iallreduce, reduce_scatter, reduce",
        ),
        (1, ["allreduce", "--plot", "x.pdf"], "expected a file name ending in .png, got 'x.pdf'"),
        (1, ["allreduce", "more"], "bench: unrecognized arguments: more; hpcdp bench -h lists the options"),
    ],
)
def test_misuse_is_told_on_every_rank(ranks: int, given: list[str], says: str) -> None:
    def rank(world: World) -> str:
        with pytest.raises(ConfigError) as caught:
            command.run(command.parse(given), world)
        return str(caught.value)

    for said in thread_comm.run(ranks, rank):
        assert says in said and "\n" not in said


def test_each_file_is_one_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with raises(ConfigError, operation="bench", expected=["--csv", "--json", "--plot"]):
        command.parse(["allreduce", "--csv", str(tmp_path / "file"), "--json", str(tmp_path / "link")])
    assert command.parse(["allreduce", "--csv", "/dev/null", "--json", "/dev/null"]).files == ["/dev/null"] * 2


@pytest.mark.parametrize("given", [["--op", "mean"], pytest.param(["-T", "bfloat16"], marks=pytest.mark.thorough)])
def test_a_nonblocking_peer_that_reduces_in_its_own_way(given: list[str], tmp_path: Path) -> None:
    settings = command.parse(["iallreduce", "-m", "64:64", *given, *QUICK])

    def rank(world: World) -> dict[str, Any]:
        how = communication.CollectiveSweep("iallreduce", dtype_of(settings.dtype), settings.op, iterations=3, warmup=1)
        (row,) = communication.overlap_sweep(how, [64], world, beside_library=True)
        return row

    for row in thread_comm.run(2, rank):
        assert row["wrong"] == 0
        assert ("library" in row) == ("mean" in given)  # MPI has no bfloat16
        assert row.get("library", row)["wrong"] == 0


LAUNCH = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", sys.executable, "-m", "hpcdp.cli", "bench"]


@pytest.mark.parametrize("wrong", [["latencyy"], ["allreduce", "--algorithm", "rng"]])
@pytest.mark.thorough
def test_one_rank_speaks_of_misuse(wrong: list[str]) -> None:
    done = subprocess.run([*LAUNCH, *wrong], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("hpcdp: ") == 1 and "did you mean" in done.stderr and done.stdout == ""
