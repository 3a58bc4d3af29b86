"""The benchmarks that are programs say in one line, on one rank, what was asked wrongly."""

import importlib.util
import os
import runpy
import signal
import subprocess
import sys

import pytest
from raises import raises

from bench_harness import programs
from hpcdp.errors import ConfigError, LaunchError

LAUNCH = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", sys.executable]


def start(name: str, given: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Run a program in this process, as ``python benchmarks/bench_NAME.py GIVEN`` does, and return its status."""
    path = str(programs.path_of(name))
    monkeypatch.setattr(sys, "argv", [path, *given])
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)  # the tests that follow have all cores
    with pytest.raises(SystemExit) as left:
        runpy.run_path(path, run_name="__main__")
    return left.value.code


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("fabric", ["--algorithms", "rng"], "unknown allreduce algorithm 'rng'"),
        ("kernels", ["--factor", "1"], "size factor: expected an integer >= 2, got 1"),
        ("allreduce", ["-m", "64:4"], "expected MIN:MAX with 0 < MIN <= MAX"),
        (
            "gradients",
            ["--json", "/nowhere/x.json"],
            "[/nowhere/x.json]: expected a file that can be written, got no folder /nowhere",
        ),
        ("suite", ["--into", "/nowhere"], "got no folder /nowhere"),
        ("suite", ["--ranks", "1"], "--ranks: expected a whole number from 2, got '1'"),
        ("allreduce", ["--mpich", sys.executable, "--ranks", "1"], "--ranks: expected a whole number from 2, got '1'"),
        ("startup", ["--repeats", "0"], "--repeats: expected a whole number from 1, got '0'"),
        ("train_lenet", ["--batch", "x"], "--batch: expected a whole number from 1, got 'x'"),
        ("train_models", ["--seconds", "nan"], "--seconds: expected a number from 0, got 'nan'"),
        ("checkpoint", ["--folder", "/nowhere"], "folder that can be written, got /nowhere: No such file or directory"),
        ("floor", ["-m", "4"], "expected MIN:MAX"),
    ],
)
def test_misuse_is_one_line(
    name: str, given: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = start(name, given, monkeypatch)
    printed, said = capsys.readouterr()
    assert (status, printed) == (2, "")
    (line,) = said.splitlines()
    assert line.startswith("hpcdp: ")
    assert says in line


@pytest.mark.parametrize(("name", "given"), [("train_lenet", ["--framework", "torch"]), ("torch_ddp", [])])
def test_what_needs_pytorch_says_so(name: str, given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(ConfigError, operation=" ".join([name, *given]), expected="PyTorch"):
        importlib.import_module(f"bench_{name}").main(given)


def test_one_rank_speaks() -> None:
    command = [*LAUNCH, str(programs.path_of("train_lenet")), "--framework", "compare"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("hpcdp: train_lenet [--framework]: expected hpcdp or torch on several ranks") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", [ConfigError, LaunchError])
def test_the_status_is_that_of_the_program_or_2(kind: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    def wrong() -> int:
        raise kind("a mistake")

    for main, status, said in ((lambda: 1, 1, ""), (lambda: 0, 0, ""), (wrong, 2, "hpcdp: a mistake\n")):
        with pytest.raises(SystemExit) as left:
            programs.run(main)
        assert left.value.code == status
        assert capsys.readouterr().err == said


def test_a_full_disk_and_a_closed_pipe_end_it_without_a_traceback() -> None:
    helps = [sys.executable, programs.path_of("floor"), "-h"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(helps, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "hpcdp: bench_floor [standard output]: got no space left on device\n")
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        done = subprocess.run(helps, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_an_interrupt_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as left:
        programs.run(interrupted)
    assert left.value.code == 128 + signal.SIGINT
    assert capsys.readouterr().err == "hpcdp: interrupted\n"


@pytest.mark.parametrize("name", ["floor", "train_lenet", "train_models"])
def test_help_fits_a_terminal(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert start(name, ["-h"], monkeypatch) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
