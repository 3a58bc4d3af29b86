"""`hpcdp slurm` against stand-ins of Slurm's commands, which validate what they are given."""

import os
import re
from pathlib import Path

import pytest
from raises import raises

from hpcdp import cli
from hpcdp.errors import LaunchError
from hpcdp.launch import slurm_scripts
from hpcdp.launch.slurm_scripts import Script

TRAIN = ("--", "hpcdp", "train", "lenet", "--run-dir", "out/a")


def test_submit_writes_a_file_for_its_owner_and_tells_the_job(standin, capsys: pytest.CaptureFixture[str]) -> None:
    Path("hpcdp-site.toml").write_text(
        'mpi_type = "pmix"\ntime = "1"\naccount = "a \\"b\\" c\'d"\nsbatch = ["--comment=back\\\\slash # none"]\n'
    )
    assert cli.main(["slurm", "submit", "train", "--nodes", "2", "--ranks-per-node", "3", *TRAIN]) == 0
    printed = capsys.readouterr()
    assert printed.out == "4711\n"
    assert [re.split("  +", line) for line in printed.err.splitlines()] == [
        ["requested", "change it with"],
        ["2 nodes", "--nodes N"],
        ["3 ranks on each node", "--ranks-per-node N"],
        ["1 core for each rank", "--cpus-per-task N"],
        ["time limit 1", "--time TIME"],
    ]
    (path,) = Path("out").iterdir()
    assert re.fullmatch(r"train-\d{8}-\d{6}\.sbatch", path.name)
    assert path.stat().st_mode & 0o777 == 0o600
    said = standin()["4711"]["said"]
    assert said["account"] == 'a "b" c\'d' and said["comment"] == "back\\slash # none"
    assert said["nodes"] == "2" and said["ntasks-per-node"] == "3" and said["output"] == "out/train-%j.out"


def test_a_script_holds_the_bytes_of_an_argument(tmp_path: Path) -> None:
    path = slurm_scripts.write(Script(os.fsdecode(b"python caf\xe9.py\n"), "train", tmp_path, ()))
    assert path.read_bytes() == b"python caf\xe9.py\n"


def test_a_script_is_not_written_where_every_user_may_exchange_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with raises(LaunchError, operation="write the script", where=tmp_path) as caught:
        slurm_scripts.write(Script("", "train", tmp_path, ()))
    assert caught.value.got == f"{tmp_path}, which every user may write"  # the line may be cut


def test_two_of_one_second_have_two_files(standin) -> None:
    for _ in range(3):
        assert cli.main(["slurm", "submit", "train", "--time", "5", *TRAIN]) == 0
    assert len(list(Path("out").iterdir())) == 3


@pytest.mark.parametrize("template", ["train", "train-gpu", "sweep", "benchmark"])
def test_every_template_is_taken(standin, template: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("lines").write_text("--lr 0.1\n--lr 0.2\n")
    settings = ["--settings", "lines", "--at-once", "1"] if template == "sweep" else []
    gpus = ["--gres", "gpu:2"] if template == "train-gpu" else []
    assert cli.main(["slurm", "submit", template, *gpus, *settings]) == 0
    assert standin()["4711"]["name"] == template
    assert standin()["4711"]["said"].get("array") == ("1-2%1" if settings else None)


def test_a_dry_run_touches_nothing(standin, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["slurm", "submit", "train", "--dry-run", *TRAIN]) == 0
    shown = capsys.readouterr().out
    assert cli.main(["slurm", "render", "train", *TRAIN]) == 0
    text = capsys.readouterr().out
    assert shown == text + "# would be written to out/train-TIME.sbatch\n"
    assert not Path("out").exists() and standin() == {}


def test_what_sbatch_refuses_is_one_line_and_leaves_no_file(standin, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["slurm", "submit", "train", "--partition", "none", *TRAIN]) == 2
    said = capsys.readouterr().err
    assert "got sbatch: error: invalid partition specified: none" in said and said.count("\n") == 1
    assert list(Path("out").iterdir()) == []


@pytest.mark.thorough
def test_status_asks_the_queue_then_the_accounts_then_what_is_remembered(
    standin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["slurm", "status"]) == 0
    assert capsys.readouterr().out == "no job of yours is in the queue\n"
    standin(job7={"name": "a|b"}, job8={"state": "PENDING"}, job9={"state": "COMPLETED"})
    assert cli.main(["slurm", "status"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "JOB  STATE    TIME  WHERE      NAME",
        "7    RUNNING  1:02  node[1-2]  a|b",
        "8    PENDING  1:02  node[1-2]  x",
    ]
    for accounts in ("yes", "no"):
        monkeypatch.setenv("STANDIN_ACCOUNTS", accounts)
        assert cli.main(["slurm", "status", "9"]) == 0
        assert capsys.readouterr().out.splitlines()[1] == "9    COMPLETED  00:01:02  exit 0:0  x"


@pytest.mark.parametrize("command", ["status", "cancel"])
def test_unknown_jobs_are_named(standin, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    standin(job7={}, job9={"state": "FORGOTTEN"})
    assert cli.main(["slurm", command, "7", "9", "12"]) == 2
    shown, said = capsys.readouterr()
    assert said == "hpcdp: Slurm job: expected your jobs in the queue (7), got 9, 12\n"
    known = ["JOB  STATE    TIME  WHERE      NAME", "7    RUNNING  1:02  node[1-2]  x"]
    assert shown.splitlines() == (known if command == "status" else [])
    assert standin()["7"]["log"] == []
    assert cli.main(["slurm", command, "7;x"]) == 2
    assert "expected a number such as 4711, or 4711_3 for a task, got '7;x'" in capsys.readouterr().err


def test_cancel(standin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_scripts, "_POLL_S", 0.01)
    standin(job7={}, job8={}, job9={"state": "COMPLETED"})
    assert cli.main(["slurm", "cancel", "7"]) == 0
    assert cli.main(["slurm", "cancel", "--save", "8"]) == 0
    assert standin()["7"]["log"] == ["cancel"]
    assert standin()["8"]["log"] == ["no requeue", "USR1", "cancel"]
    assert capsys.readouterr().out == f"job 8 has reported no checkpoint: see {Path.cwd()}/out of 8\n"
    assert cli.main(["slurm", "cancel", "9"]) == 2
    assert "cancel [9]: expected a job in the queue, got COMPLETED" in capsys.readouterr().err


def test_cancel_tells_how_what_it_has_saved_goes_on(
    standin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_scripts, "_POLL_S", 0.01)
    standin(job7={}, job8={"state": "PENDING"})
    Path("out of 7").write_text("hpcdp: job 7, start 1\nhpcdp: job 7 is not requeued; resume with: sbatch a\nlast\n")
    assert cli.main(["slurm", "cancel", "--save", "7", "8"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "job 7 is not requeued; resume with: sbatch a",
        "job 8 was PENDING: it had nothing to save",
    ]


@pytest.mark.parametrize("arguments", [["status"], ["cancel", "1"], ["submit", "train"]])
def test_without_slurm_it_is_one_line(
    arguments: list[str], standin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["slurm", *arguments]) == 2
    said = capsys.readouterr().err
    assert "expected Slurm's commands on PATH, got none; run this on a login node" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "slurm: expected a command, got none; list the commands with hpcdp slurm -h"),
        (["rendre"], "unknown slurm command 'rendre'; did you mean 'render'? valid: render, submit, status, cancel"),
        (["render", "gpu"], "unknown template 'gpu'"),
        (["render", "train", "--nodes", "0"], "argument --nodes: expected a whole number from 1, got '0'"),
        (["render", "train", "--nods", "2"], "slurm render: unknown option '--nods' (did you mean '--nodes'?)"),
        (["render", "train", "--time", "soon"], "hpcdp: --time: expected a time as Slurm writes it, e.g. 04:00:00"),
        (["render", "train", "--partition", "a b"], "hpcdp: --partition: expected a name of letters, digits and"),
        (["render", "train", "--account", ""], "hpcdp: --account: expected text on one line, got ''"),
        (["render", "train-gpu", "--gres", "gpu=x y"], "hpcdp: --gres: expected a name, its type and its number"),
        (["submit", "train", "--gres", "gpu:1"], "hpcdp: --gres: expected the template train-gpu or interactive, got"),
        (["render", "train", "--nodes", "99999999999"], "hpcdp: --nodes: expected at most 1,000,000, got 99999999999"),
        (
            ["submit", "sweep"],
            "sweep: expected --settings FILE, a line of further arguments for each task, got none; write lines "
            "such as --lr 0.1 and --lr 0.2 into a file: hpcdp slurm submit sweep --settings lines.txt -- hpcdp train",
        ),
        (["submit", "interactive"], "expected a template of a batch job, got interactive; run hpcdp slurm "),
        (["render", "train", "--site", "x.toml"], "site profile [x.toml]: expected a file, got no such file"),
    ],
)
def test_what_is_asked_wrongly(arguments: list[str], says: str, standin, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["slurm", *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
