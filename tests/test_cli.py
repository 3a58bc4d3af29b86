"""The command line from outside: help, bad input, and a run that does what its flags say."""

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcdp import cli
from hpcdp.cli import train as cli_train
from hpcdp.errors import SaveError
from hpcdp.launch.parser import Parser
from hpcdp.launch.process_monitor import _ranks_below

QUICK = ("--epochs", "1", "--warmup-epochs", "0", "--shift", "0", "--seed", "3")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hpcdp.cli", *arguments]


def hpcdp(*arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=120, cwd=cwd, env=os.environ | environ
    )


FORKS = """
import json, os, sys
import numpy
import hpcdp.cli.launch, hpcdp.launch.launchers.mpirun, hpcdp.train.config, hpcdp.train.run
from hpcdp import cli

for line in sys.stdin:
    arguments, folder, environ = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(folder)
    os.environ |= environ
    for number, name in enumerate(sys.argv[1:], 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.exit(cli.main(arguments))
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """As `hpcdp`, in forks of one process that has imported it: starting one for each command takes most of the time.

    MPI has not been loaded there.
    """
    names = [tmp_path_factory.mktemp("forked") / name for name in ("out", "err")]
    with subprocess.Popen(
        [sys.executable, "-c", FORKS, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def run(*arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
            print(json.dumps([arguments, str(cwd or Path.cwd()), environ]), file=asked, flush=True)
            status = int(answers.readline())
            return subprocess.CompletedProcess(arguments, status, *(name.read_text() for name in names))

        yield run


def parsers(made: Parser) -> Iterator[Parser]:
    yield made
    for command_parser in made.commands.values():
        yield from parsers(command_parser)


def test_every_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = set()
    for made in parsers(cli.complete_parser()):
        names.add(made.prog)
        for line in made.format_help().splitlines():
            assert len(line) <= 80, (made.prog, line)
    assert {"hpcdp", "hpcdp train", "hpcdp launch", "hpcdp bench", "hpcdp slurm render", "hpcdp checkpoint ls"} <= names


def test_info_fits_80_columns(forked: Run) -> None:
    lines = forked("info", COLUMNS="80").stdout.splitlines()
    assert lines and all(len(line) <= 80 or " " not in line[15:] for line in lines)  # a path is not broken


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_takes_the_completion(shell: str, forked: Run, tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_text(forked("completion", shell).stdout)
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    subprocess.run([shell, "-n", script], check=True)
    if shell == "bash":
        words = f"source {script}; COMP_WORDS=(hpcdp checkpoint ver); COMP_CWORD=2; _shtab_hpcdp; echo $COMPREPLY"
        assert subprocess.run(["bash", "-c", words], capture_output=True, text=True).stdout == "verify\n"


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("hpcdp trai", "hpcdp train "),
        ("hpcdp train char", "hpcdp train char_lstm "),
        ("hpcdp bench --style nc", "hpcdp bench --style nccl "),
        ("hpcdp slurm submit train-", "hpcdp slurm submit train-gpu "),
        ("hpcdp launch -n 2 -- python prog", "hpcdp launch -n 2 -- python program.py "),
    ],
)
def test_zsh_completes(line: str, completed: str, forked: Run, tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("there is no zsh")
    (tmp_path / "program.py").touch()
    (tmp_path / "_hpcdp").write_text(forked("completion", "zsh").stdout)
    (tmp_path / ".zshrc").write_text(
        f"PS1='> '; fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -u -d {tmp_path}/dump\n"
        "show() { print -r -- \"<$BUFFER>\" >shown; exit }; zle -N show; bindkey '^T' show\n"
    )
    reader, terminal = pty.openpty()
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "ZDOTDIR": str(tmp_path), "TERM": "dumb"}
    shell = subprocess.Popen(
        ["zsh", "-i"], stdin=terminal, stdout=terminal, stderr=terminal, cwd=tmp_path, env=environ,
        start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    try:
        os.write(reader, f"{line}\t\x14".encode())
        with contextlib.suppress(OSError):  # Linux: the shell has closed the terminal
            while os.read(reader, 4096):
                pass
        shell.wait(timeout=30)
    finally:
        shell.kill()
        os.close(reader)
    assert (tmp_path / "shown").read_text() == f"<{completed}>\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["-h"],
        ["train", "-h"],
        ["bench", "-h"],
        ["bench", "latencies"],
        ["launch", "-n", "0", "--", "x"],
        ["train", "--lr", "x"],
        ["train", "lennet"],
        ["train", "--run-dir", "/"],
        ["train", "--resume", "/nowhere"],
    ],
)
def test_neither_help_nor_an_error_loads_mpi_or_numpy(arguments: list[str]) -> None:
    code = (
        "import sys; from hpcdp import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'mpi4py', 'numpy', 'numba'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True).returncode == 0


def test_help_names_what_there_is() -> None:
    from hpcdp.data.catalog import NAMES
    from hpcdp.nn.models import MODELS

    shown = " ".join(hpcdp("train", "-h", COLUMNS="80").stdout.split())
    assert f"network to train: {', '.join(sorted(MODELS))} (" in shown
    assert f"data set to train on (default: shakespeare for sequences, else digits): {', '.join(NAMES)} -" in shown
    assert "--data-dir DIR folder of data sets, e.g. ~/data for ~/data/mnist" in shown
    assert "--data mnist --data-dir ~/data" in shown


def test_import_is_lazy() -> None:
    code = "import sys, hpcdp; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
    assert "hpcdp" in loaded
    assert not {"numpy", "mpi4py", "numba", "h5py", "matplotlib", "rich", "tensorboardX", "hpcdp.comm"} & set(loaded)


def test_the_public_face() -> None:
    import hpcdp

    for name in hpcdp.__all__:
        assert getattr(hpcdp, name) is getattr(hpcdp, name)
    assert set(hpcdp.__all__) <= set(dir(hpcdp))
    with pytest.raises(AttributeError, match=r"no attribute 'Trianer'; it has .*Trainer"):
        hpcdp.Trianer  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'? valid: train, info, doctor, launch, bench, tune"),
        ([], "hpcdp: expected a command, got none; hpcdp -h lists the commands"),
        (["train", "lenet", "extra"], "hpcdp: train: unrecognized arguments: extra; hpcdp train -h lists the options"),
        (["train", "--run-dir", ""], "setting run_dir: expected a non-empty string without NUL, got ''"),
        (["train", "--epoch", "3"], "train: unknown option '--epoch' (did you mean '--epochs'?); hpcdp train -h lists"),
        (["train", "--epochs", "x"], "setting epochs: expected an integer, got 'x'"),
        (["train", "--lr", "0"], "setting lr: expected more than 0, got 0.0"),
        (["train", "--lr"], "train: argument --lr: expected one argument; write a value that begins with - as --lr=-"),
        (
            ["launch", "-n", "2", "--mpi-args", "-v", "--", "true"],
            "begins with - as --mpi-args=-...; hpcdp launch -h",
        ),
        (["train", "lenett"], "'lenett'"),
        (["train", "--data", "digitz"], "'digitz'"),
        (["train", "--batch-size", "3", "--ranks", "4"], "at least one sample for each of the 4 ranks, got 3"),
        (["train", "--shift", "28"], "RandomCrop: expected images larger than 28 pixels, got samples of shape (1, 28,"),
        (
            ["train", "gpt", "--flip"],
            "setting flip: expected images (channels, height, width), got samples of shape (64,) in",
        ),
        (["train", "--config", "none.toml"], "[none.toml]: expected a TOML file, got no such file or folder"),
        (["launch", "-n", "two", "--", "x"], "launch -n: expected a number of ranks, 1 to 1,000,000, got 'two'"),
        (["launch", "-n", "999999999999", "--", "x"], "1 to 1,000,000, got '999999999999'"),
        (["launch", "-n", "2", "-s", "-1", "--", "x"], "launch -s: expected a number of servers, 0 to 1,000,"),
        (
            ["launch", "-n", "2", "-s", "1.5", "--", "x"],
            "launch -s: expected a number of servers, 0 to 1,000,000, got '1",
        ),
        (["train", "-s", "x"], "setting servers: expected an integer, got 'x'"),
        (["launch", "-n", "2", "--mpi-args='unbal", "--", "x"], "--mpi-args: expected closed quotes, got"),
        (["launch", "-n", "2", "--", __file__], "got a file that is not executable; put its interpreter before"),
        (["launch", "-n", "2"], "expected a program after --"),
        (["launch", "--", "x"], "required: -n/--ranks"),
        (
            ["launch", "-n", "2", "--hosts-file", "x", "--", "x"],
            "unknown option '--hosts-file' (did you mean '--hosts'?)",
        ),
        (
            ["launch", "-n", "2", "--launcher", "shh", "--", "x"],
            "unknown launcher 'shh'; did you mean 'ssh'? valid: lo",
        ),
        (
            ["launch", "-n", "2", "--bind", "cores", "--", "x"],
            "unknown --bind 'cores'; did you mean 'core'? valid: none",
        ),
        (["launch", "-n", "2", "--env", "1A=x", "--", "x"], "--env: expected NAME=VALUE, the NAME of a variable of th"),
        (["launch", "-n", "2", "--env", "NOT_SET", "--", "x"], "--env: expected NOT_SET=VALUE, as it is not set here"),
        (["launch", "-n", "2", "--env", "PATH=", "--", "x"], "--env: expected a PATH with folders of programs"),
        (["launch", "-n", "2", "-H", "a;b", "--", "x"], "read hosts [-H 'a;b']: expected HOST, HOST:SLOTS or"),
        (["launch", "-n", "2", "-H", f"/{'x' * 300}", "--", "x"], "got a name that is too long"),
        (["info", "--xml"], "info: unknown option '--xml'; hpcdp info -h lists the options"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: list[str], says: str, tmp_path: Path, forked: Run) -> None:
    done = forked(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr and "hpcdp: hpcdp" not in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("locale", ["utf-8", "C"])
def test_a_printed_command_has_the_bytes_of_its_arguments(locale: str) -> None:
    utf_8 = {"PYTHONIOENCODING": "utf-8:strict"}  # as in any locale but C
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environ = os.environ | (utf_8 if locale == "utf-8" else ascii_only)
    printed = command("launch", "-n", "1", "--dry-run", "--", "true", os.fsdecode(b"caf\xe9"), "ü")
    done = subprocess.run(printed, capture_output=True, env=environ, timeout=60)
    assert done.stdout.endswith(b" true 'caf\xe9' '\xc3\xbc'\n"), done.stderr


def test_a_character_that_standard_output_lacks_is_escaped() -> None:
    latin = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"}
    done = subprocess.run(
        command("launch", "-n", "1", "--dry-run", "--", "true", "ü"), capture_output=True, env=os.environ | latin
    )
    assert done.stdout.endswith(b" true '\\xfc'\n"), done.stderr


@pytest.mark.parametrize("name", ["train", "launch"])
def test_a_working_folder_that_is_gone_is_one_line(name: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    shell = ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(gone)]
    done = subprocess.run([*shell, *command(name, "-n", "1", "true")], capture_output=True, text=True, timeout=60)
    said = f"hpcdp: {name}: expected a working folder, got no such file or folder; cd to another\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.slow
def test_what_cannot_be_written_was_not_asked_wrongly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: object) -> int:
        raise SaveError("save", got="No space left on device")

    monkeypatch.setattr(cli_train, "_train", fail)
    assert cli.main(["train"]) == 1
    assert capsys.readouterr().err == "hpcdp: save: got No space left on device\n"


def test_memory_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: object) -> int:
        raise MemoryError("Out of memory allocating 512 bytes")  # of which CuPy's and NumPy's are kinds

    monkeypatch.setattr(cli_train, "_train", fail)
    assert cli.main(["train"]) == 1
    said = "train: expected more memory, got Out of memory allocating 512 bytes; use smaller batches, or fewer ranks"
    assert capsys.readouterr().err == f"hpcdp: {said} a node\n"


def test_a_warning_of_a_command_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def warn(arguments: object) -> int:
        warnings.warn("taking step 7 instead", stacklevel=1)
        warnings.warn("of an array", RuntimeWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(cli_train, "_train", warn)
    assert cli.main(["train"]) == 0
    ours, *others = capsys.readouterr().err.splitlines()
    assert ours == "hpcdp: taking step 7 instead"
    assert "RuntimeWarning: of an array" in others[0]


@pytest.mark.slow
def test_ranks_that_contradict_mpirun(tmp_path: Path) -> None:
    inner = command("train", "--ranks", "3", *QUICK)
    done = hpcdp("launch", "-n", "1", "--", *inner, cwd=tmp_path)
    assert done.returncode == 2
    assert "expected 1, the ranks that the launcher started, got 3" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_servers_that_contradict_mpirun(tmp_path: Path) -> None:
    done = hpcdp(
        "launch", "-n", "1", "--", *command("train", "-s", "1", "--kv-store", "dist_async", *QUICK), cwd=tmp_path
    )
    assert done.returncode == 2
    assert "expected 0, the servers that the launcher started, got 1" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.parametrize("to_a_rank", [False, True])
def test_a_signal_to_a_run_ends_its_ranks_and_keeps_what_it_wrote(to_a_rank: bool, tmp_path: Path) -> None:
    arguments = command("train", "mlp", "--ranks", "2", "--epochs", "100000", "--run-dir", "run")
    job = subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") > 1):
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (mpirun,) = map(int, subprocess.check_output(["pgrep", "-P", str(job.pid)]).split())
    os.kill(dict(_ranks_below(mpirun))[1] if to_a_rank else job.pid, signal.SIGTERM)
    shown, said = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM
    first, *_, last = said.splitlines()
    assert last.startswith("hpcdp: ended by SIGTERM, all ranks have ended; its files are in run"), said
    if to_a_rank:
        assert "SIGTERM) before the others" in said
    else:
        assert first == "hpcdp launch: SIGTERM: the run saves and ends; a second one ends it at once"
        assert last.endswith("; resume with: hpcdp train --resume run")
        assert "(SIGTERM): a checkpoint is in run/checkpoints\n" in shown
        (saved,) = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")][-1:]
        steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
        assert int(saved.removeprefix("step-")) >= steps[-1]
    assert all(line.startswith("{") and line.endswith("}") for line in metrics.read_text().splitlines())


def test_a_closed_pipe_is_no_traceback() -> None:
    process = subprocess.Popen(command("info"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("arguments", [["info"], ["launch", "-n", "1", "--", "true"]])
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_closed_output_is_written_nowhere(arguments: list[str], closed: str) -> None:
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *command(*arguments)]
    done = subprocess.run(shell, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_may_have_characters_that_the_locale_has_not(tmp_path: Path) -> None:
    folder = tmp_path / "größe"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"kind": "step", "epoch": 1, "step": 1}\n')
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command("report", str(folder)), env=ascii_only, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{tmp_path}/gr\\xf6\\xdfe/report.html, " in done.stdout


FURTHER = [["info", "--json"], ["train", "-h"], ["--version"]]
"""Which go the ways of the two before them: a command's own output, and argparse's."""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [["info"], ["--help"], *(pytest.param(each, marks=pytest.mark.thorough) for each in FURTHER)],
)
def test_a_full_output_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(*arguments), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, cwd=tmp_path
        )
    said = f"hpcdp: {arguments[0]} [standard output]: got no space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)
