"""Rendered scripts: compared whole, checked by shellcheck, and every value arrives as it was given."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from raises import raises

from hpcdp.core.files import data_folder
from hpcdp.errors import ConfigError
from hpcdp.launch import slurm_scripts
from hpcdp.launch.slurm_scripts import Profile, ScriptRequest, render

GOLDEN = Path(__file__).with_name("golden")
SRUN = Profile(
    mpi_type="pmix", time="04:00:00", partition="main", account="proj 7", modules=("gcc/12", "openmpi/5.0"),
    venv="/shared/my venv", gres="gpu:4", env={"HPCDP_CACHE_DIR": "/scratch/$USER's"},
    sbatch=("--constraint=ib", '--comment=a "b" c\\d'),
)  # fmt: skip
MPIRUN = Profile(launcher="mpirun", time="2-12", qos="long", image="/shared/hp cdp.sif")
TRAIN = ("hpcdp", "train", "lenet", "--data", "digits")
LINES = (("--lr", "0.1"), ("--lr", "0.2", "--seed", "3"), ("--model", "it's $HOME"))
CASES = {
    "train-srun": (ScriptRequest(template="train", nodes=4, ranks_per_node=2, program=TRAIN), SRUN),
    "train-mpirun": (
        ScriptRequest(
            template="train", nodes=2, ranks_per_node=3, name="a.b", program=(*TRAIN, "--run-dir", "runs/a b")
        ),
        MPIRUN,
    ),
    "train-pmi2": (ScriptRequest(template="train", program=TRAIN), Profile(mpi_type="pmi2", time="30")),
    "train-gpu-srun": (ScriptRequest(template="train-gpu", ranks_per_node=4, cpus_per_task=8, program=TRAIN), SRUN),
    "train-gpu-mpirun": (
        ScriptRequest(template="train-gpu", nodes=2, program=("python", "train.py", "a\\b", "$x")),
        Profile(launcher="mpirun", time="60", gres="gpu:a100:2", image="x.sif"),
    ),
    "sweep": (ScriptRequest(template="sweep", ranks_per_node=2, program=TRAIN, settings=LINES, at_once=2), SRUN),
    "benchmark": (ScriptRequest(template="benchmark", nodes=2, cpus_per_task=2), SRUN),
    "interactive": (ScriptRequest(template="interactive", nodes=2, ranks_per_node=4), SRUN),
}


@pytest.mark.parametrize("name", CASES)
def test_the_whole_script(name: str) -> None:
    path = GOLDEN / f"{name}.sh"
    text = render(*CASES[name]).text
    if os.environ.get("HPCDP_TEST_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_every_template_has_a_golden_file() -> None:
    assert {request.template for request, _ in CASES.values()} == set(slurm_scripts.TEMPLATES)
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_bash_and_shellcheck_find_nothing(name: str) -> None:
    path = GOLDEN / f"{name}.sh"
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    # SC1091 would follow the site's own activate; SC2016: a value with $ is meant to stay as it is.
    done = subprocess.run(["shellcheck", "-e", "SC2016", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def directives(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.MULTILINE))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("train", "sweep"))])
def test_what_a_job_that_comes_back_needs(name: str) -> None:
    text = render(*CASES[name]).text
    said = directives(text)
    assert said["signal"] == "B:USR1@120" and said["open-mode"] == "append" and "requeue" in said
    assert "ntasks-per-node" in said and "ntasks" not in said
    assert "export SRUN_CPUS_PER_TASK=" in text
    assert text.index("trap 'ends_soon=1' USR1") < text.index("program=(")


def test_folders_below_ones_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/a b")
    site = Profile(mpi_type="pmix", time="1", venv="~/env", image="~/x.sif")
    text = render(ScriptRequest(template="train", program=TRAIN), site).text
    assert "source '/home/a b/env/bin/activate' || exit 1" in text and "apptainer exec '/home/a b/x.sif'" in text


def test_a_home_that_nobody_has_is_a_line() -> None:
    for key in ("venv", "image"):
        site = Profile(mpi_type="pmix", time="1", **{key: "~nobody-of-that-name/x"})
        with raises(ConfigError, operation=f"site profile: {key}", got="~nobody-of-that-name/x"):
            render(ScriptRequest(template="train", program=TRAIN), site)


def test_a_colon_alone_is_refused_for_srun() -> None:
    request = ScriptRequest(template="benchmark", program=("python", "a:b", ":"))
    with raises(ConfigError, operation="program"):
        render(request, SRUN)
    assert "-- python a:b :\n" in render(request, Profile(launcher="mpirun", time="1")).text


def test_a_folder_of_its_own_to_go_on_in() -> None:
    made = render(ScriptRequest(template="train", program=TRAIN), SRUN)
    assert "run=${1:-runs/train-$job}\n" in made.text
    assert f'program=({" ".join(TRAIN)} --run-dir "$run" --resume auto)' in made.text
    assert made.folder == Path("runs")
    named = render(ScriptRequest(template="train", program=(*TRAIN, "--run-dir=x/y", "--resume", "x/y")), SRUN)
    assert f"program=({' '.join(TRAIN)} --run-dir=x/y --resume x/y)" in named.text
    assert named.folder == Path("x") and directives(named.text)["output"] == "x/train-%j.out"
    other = render(ScriptRequest(template="train", program=("python", "my.py")), SRUN)
    assert "program=(python my.py)" in other.text


@pytest.mark.parametrize(
    ("profile", "request_", "says"),
    [
        (
            Profile(mpi_type="pmix"),
            ScriptRequest(template="train"),
            "expected the key time, got none; use --time",
        ),
        (Profile(time="1"), ScriptRequest(template="train"), "expected the key mpi_type, got none"),
        (
            Profile(time="1", mpi_type="pmi2"),
            ScriptRequest(template="train-gpu"),
            "the key gres, got none; use --gres",
        ),
        (
            SRUN,
            ScriptRequest(template="train", program=(*TRAIN, "--overwrite")),
            "expected no --overwrite, as the job is resumed",
        ),
        (SRUN, ScriptRequest(template="sweep", settings=(("--run-dir", "x"),)), "sweep: expected no --run-dir, got x"),
    ],
)
def test_what_is_missing_or_cannot_be(profile: Profile, request_: ScriptRequest, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        render(request_, profile)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"template": "trian"}, "unknown template 'trian'; did you mean 'train'? valid: train, train-gpu, sweep,"),
        ({"template": "train", "name": "a b"}, "--name: expected letters, digits and _.-, got 'a b'"),
        ({"template": "train", "nodes": 10**9}, "--nodes: expected at most 1,000,000, got 1000000000"),
        ({"template": "train", "program": ("a\nb",)}, "expected arguments of one line"),
        ({"template": "sweep"}, "expected a file of 1 to 100,000 lines of settings, got 0; use --settings FILE"),
        ({"template": "train", "at_once": 3}, "train: expected no settings of a sweep"),
    ],
)
def test_a_request_that_is_wrong(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ScriptRequest(**arguments)
    assert says in str(raised.value)


def test_a_sweeps_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("# first\n--lr 0.1  # small\n\n--model 'a b'\n")
    assert slurm_scripts.read_settings(path) == (("--lr", "0.1"), ("--model", "a b"))
    path.write_bytes(b"\xef\xbb\xbf--lr 0.1\r\n--lr 0.2\r\n")
    assert slurm_scripts.read_settings(path) == (("--lr", "0.1"), ("--lr", "0.2"))
    path.write_text("--lr 1\n--model 'a\n")
    with raises(ConfigError, operation="sweep", where=f"{path}, line 2"):
        slurm_scripts.read_settings(path)
    with raises(ConfigError, operation="sweep", where=tmp_path / "none"):
        slurm_scripts.read_settings(tmp_path / "none")


@pytest.mark.parametrize(
    ("limit", "lead_s"),
    [("04:00:00", 120), ("4", 120), ("3", 90), ("2:30", 75), ("00:02:00", 60), ("0-0:1", 30), ("0-1", 120),
     ("1-0:0:2", 120), ("0", 120), ("UNLIMITED", 120)],
)  # fmt: skip
def test_a_short_job_is_not_told_to_stop_in_its_first_half(limit: str, lead_s: int) -> None:
    text = render(ScriptRequest(template="train"), Profile(mpi_type="pmix", time=limit)).text
    assert f"#SBATCH --signal=B:USR1@{lead_s}\n" in text


class Stage:
    """A rendered job that bash runs here: srun, scontrol and what the ranks run are small scripts."""

    def __init__(
        self, folder: Path, program: str, request: ScriptRequest | None = None, *,
        requeue: int = 1, arguments: str = "",
        hpcdp: str = "exit 1", port: int = 1,
    ) -> None:  # fmt: skip
        self.folder = folder
        (folder / "bin").mkdir()
        self.add("srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
        known = f"   Requeue={requeue} Restarts=0 BatchFlag=1\n   Command=/a b/job.sh {arguments}".rstrip()
        config = f"SlurmdPort  = {port}\nSlurmdTimeout  = 20 sec"
        here = shlex.quote(str(folder))
        self.add(
            "scontrol",
            f"""case "$*" in
          'show job '*) cat <<<{shlex.quote(known)} ;;
          'show config') cat <<<{shlex.quote(config)} ;;
          '--oneliner show node '*) grep -sE "NodeName=(${{4//,/|}}) " {here}/nodes ;;
          *) echo "$*" >>{here}/scontrol ;;
        esac""",
        )
        self.add("program", program)
        self.add("hpcdp", hpcdp)
        self.add("sleep", "exec /bin/sleep 0.1")  # of the script's polls
        request = request or ScriptRequest(template="train", program=("program", "it's", "$HOME", 'a "b"'))
        path = folder / "job.sh"
        path.write_text(render(request, Profile(mpi_type="pmix", time="1")).text)
        environ = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n1,n2", "SLURM_SUBMIT_DIR": "/a b",
                   "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}  # fmt: skip
        if request.template == "sweep":
            environ |= {"SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "2"}
        self.job = subprocess.Popen(
            ["bash", path, *arguments.split()],
            cwd=folder,
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def add(self, name: str, text: str) -> None:
        (self.folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.folder / "bin" / name).chmod(0o755)

    def end(self, limit_s: float = 20) -> tuple[int, str]:
        said, _ = self.job.communicate(timeout=limit_s)
        return self.job.returncode, said

    def until(self, name: str, limit_s: float = 10) -> None:
        deadline = time.monotonic() + limit_s
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    @property
    def requeued(self) -> str:
        path = self.folder / "scontrol"
        return path.read_text() if path.exists() else ""


# What takes a signal is Python, as ranks are: a shell that was started with USR1 ignored cannot.
TAKES = """touch started
exec python3 -c '
import signal, sys, time
{before}
def stop(*_):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Python gives handlers up as it ends, and the next one would end it
    sys.exit({status})
signal.signal(signal.SIGUSR1, stop)
signal.signal(signal.SIGTERM, stop)
open("ready", "w").close()
for _ in range(300):  # in one sleep a signal that comes just before it would not be seen
    time.sleep(0.1)'"""


def test_arguments_and_status_arrive(tmp_path: Path) -> None:
    stage = Stage(tmp_path, 'printf "%s\\n" "$@"; exit 7')
    status, said = stage.end()
    assert (status, stage.requeued) == (7, "")
    assert said.splitlines() == [
        "hpcdp: job 12, start 1, on n1,n2", "it's", "$HOME", 'a "b"', "hpcdp: job 12 has failed with status 7",
    ]  # fmt: skip


@pytest.mark.parametrize(("status", "requeued"), [(75, "requeue 12\n"), (3, "")])
def test_usr1_reaches_the_ranks_and_75_goes_back_into_the_queue(tmp_path: Path, status: int, requeued: str) -> None:
    stage = Stage(tmp_path, TAKES.format(before="", status=status))
    stage.until("ready")
    stage.job.send_signal(signal.SIGUSR1)
    assert stage.end()[0] == status
    assert stage.requeued == requeued


def test_an_early_usr1_ends_nobody_and_is_not_lost(tmp_path: Path) -> None:
    stage = Stage(tmp_path, TAKES.format(before="time.sleep(1)", status=75))
    stage.until("started")
    stage.job.send_signal(signal.SIGUSR1)
    assert stage.end()[0] == 75
    assert (tmp_path / "ready").exists() and stage.requeued == "requeue 12\n"


FAILS = """
mkdir -p runs/train-12/checkpoints/step-000000000{step} runs/train-12/checkpoints/step-0000000009.tmp
touch runs/train-12/checkpoints/step-000000000{step}/manifest.json
echo 'srun: error: n2: task 1: Killed' >&2
echo 'srun: error: n1: task 0: Exited with exit code 14' >&2
exit 14
"""
AGAIN = "; resume with: cd /a\\ b && sbatch /a\\ b/job.sh runs/train-12"
FAILED = "hpcdp: job 12 has failed with status 137: task 1 on n2: Killed"


@pytest.mark.parametrize(
    ("before", "faults", "requeue", "last", "then"),
    [
        (None, None, 1, "hpcdp: job 12 is requeued", "1"),
        (4, "2", 1, "hpcdp: job 12 is requeued", "3"),
        (4, "3", 1, f"hpcdp: job 12 is not requeued: it was requeued 3 times after failures{AGAIN}", "3"),
        (5, None, 1, f"hpcdp: job 12 is not requeued: it has not saved since its start{AGAIN}", None),
        (None, None, 0, f"hpcdp: job 12 is not requeued{AGAIN}", None),
    ],
)
def test_after_a_failure_a_job_is_requeued_if_it_has_saved_since_its_start(
    tmp_path: Path, before: int | None, faults: str | None, requeue: int, last: str, then: str | None
) -> None:
    run = tmp_path / "runs" / "train-12"
    (run / "checkpoints").mkdir(parents=True)
    if before is not None:
        (run / "checkpoints" / f"step-000000000{before}").mkdir()
        (run / "checkpoints" / f"step-000000000{before}" / "manifest.json").touch()
    if faults is not None:
        (run / "requeues-12").write_text(faults)
    request = ScriptRequest(template="train", program=TRAIN)
    stage = Stage(tmp_path, "", request, requeue=requeue, hpcdp=FAILS.format(step=5))
    status, said = stage.end()
    assert status == 137
    assert said.splitlines()[-2:] == [FAILED, last]
    assert stage.requeued == ("requeue 12\n" if "job 12 is requeued" in last else "")
    count = run / "requeues-12"
    assert (count.read_text().strip() if count.exists() else None) == then


def test_a_fault_without_a_checkpoint_is_the_end(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "", ScriptRequest(template="train", program=TRAIN), hpcdp="mkdir -p runs/train-12; exit 3")
    status, said = stage.end()
    assert (status, stage.requeued) == (3, "")
    assert said.splitlines()[1:] == ["hpcdp: job 12 has failed with status 3"]


@pytest.mark.parametrize("named", [True, False])
def test_after_the_loss_of_a_node_slurm_says_so_before_the_job_comes_back(tmp_path: Path, named: bool) -> None:
    """Else it could start there again. Slurm itself may end the script then, and requeue the job."""
    nodes = "NodeName=n{} Arch=x86_64 NodeAddr=127.0.0.{} State={} ThreadsPerCore=1 \n"
    with socket.create_server(("127.0.0.1", 0)) as daemon:
        alive = nodes.format(1, 1, "ALLOCATED")
        (tmp_path / "nodes").write_text(alive + nodes.format(2, 2, "ALLOCATED"))
        port = daemon.getsockname()[1]
        request = ScriptRequest(template="train", program=TRAIN)
        stage = Stage(tmp_path, "", request, hpcdp=FAILS.format(step=5), port=port)
        stage.until("runs/train-12/requeues-12")
        time.sleep(0.5)
        assert stage.job.poll() is None and stage.requeued == ""
        if named:
            (tmp_path / "nodes").write_text(alive + nodes.format(2, 2, "ALLOCATED*"))
        else:
            stage.job.send_signal(signal.SIGTERM)
        status, said = stage.end()
    outside = "hpcdp: job 12 was ended from outside; unless Slurm requeues it" + AGAIN.replace(";", ",", 1)
    assert said.splitlines()[-3:] == [
        f"{FAILED}; no answer from n2",
        "hpcdp: job 12 waits until Slurm reports that n2 is down",
        "hpcdp: job 12 is requeued" if named else outside,
    ]
    assert (status, stage.requeued) == (137, "requeue 12\n" if named else "")


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("n1: task 0: Exited with exit code 14\nn2: tasks 1,3: Exited with exit code 3",
         "3|tasks 1,3 on n2: Exited with exit code 3"),
        ("n1: task 0: Killed\nn2: task 1: Segmentation fault (core dumped)",
         "139|task 1 on n2: Segmentation fault (core dumped)"),
        ("n1: task 0: Exited with exit code 14\nn2: task 1: CPU time limit exceeded",
         "152|task 1 on n2: CPU time limit exceeded"),
        ("n1: task 0: Killed\nn1: task 1: Bad system call (core dumped)",
         "159|task 1 on n1: Bad system call (core dumped)"),
        ("n2: task 1: Killed\nn1: task 0: Killed", "137|task 1 on n2: Killed"),
        ("n1: task 0: Exited with exit code 14", "14|"),
        ("Node failure on n2", "14|"),
        ("n2: tasks [1-3]: Out Of Memory", "137|tasks [1-3] on n2: Out Of Memory"),
        ("n2: task 1: Exited with exit code x[$(touch /tmp/executed)]", "14|"),
    ],
)  # fmt: skip
def test_the_status_is_that_of_the_rank_that_failed_first(tmp_path: Path, said: str, found: str) -> None:
    text = (data_folder("slurm") / "ranks.sh").read_text()
    function = re.search(r"^blame\(\) \{.*?^\}", text, re.MULTILINE | re.DOTALL)
    assert function is not None
    (tmp_path / "words").write_text("".join(f"srun: error: {line}\n" for line in said.splitlines()) + "epoch 1\n")
    command = f'{function[0]}\nstatus=14 failed="" words=words\nblame\necho "$status|$failed"'
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert done.stdout + done.stderr == f"{found}\n"


def test_a_job_that_is_canceled_names_the_command_that_goes_on_where_it_has_saved(tmp_path: Path) -> None:
    program = TAKES.format(before="", status=143).replace("touch started", FAILS.format(step=5).split("echo")[0])
    stage = Stage(tmp_path, "", ScriptRequest(template="train", program=TRAIN), hpcdp=program)
    stage.until("ready")
    stage.job.send_signal(signal.SIGTERM)
    status, said = stage.end()
    assert (status, stage.requeued) == (143, "")
    assert said.splitlines()[-1].startswith(
        "hpcdp: job 12 was ended from outside; unless Slurm requeues it, resume with: "
    )


@pytest.mark.parametrize("template", ["benchmark", "interactive"])
def test_what_does_not_train_has_no_requeues(template: str) -> None:
    with raises(ConfigError, operation="--requeues"):
        ScriptRequest(template=template, requeues=1)
    assert "requeues=0\n" in render(ScriptRequest(template="train", requeues=0), SRUN).text


def test_a_job_that_is_canceled_does_not_come_back(tmp_path: Path) -> None:
    stage = Stage(tmp_path, TAKES.format(before="", status=75))
    stage.until("ready")
    stage.job.send_signal(signal.SIGTERM)
    status, said = stage.end()
    assert (status, stage.requeued) == (75, "")
    outside = (
        "hpcdp: job 12 was ended from outside; unless Slurm requeues it, resume with: cd /a\\ b && sbatch /a\\ b/job.sh"
    )
    assert said.splitlines()[-1] == outside


@pytest.mark.parametrize("arguments", ["", "runs/train-7"])
def test_a_job_that_may_not_come_back_names_the_command_that_goes_on_in_its_folder(
    tmp_path: Path, arguments: str
) -> None:
    request = ScriptRequest(template="train", program=("hpcdp", "train", "lenet"))
    stage = Stage(tmp_path, "", request, requeue=0, arguments=arguments, hpcdp='echo "$@"; exit 75')
    status, said = stage.end()
    folder = arguments or "runs/train-12"
    assert (status, stage.requeued) == (75, "")
    assert said.splitlines()[1:] == [
        f"train lenet --run-dir {folder} --resume auto",
        "hpcdp: job 12 has stopped with a checkpoint",
        f"hpcdp: job 12 is not requeued; resume with: cd /a\\ b && sbatch /a\\ b/job.sh {folder}",
    ]


def test_a_task_that_may_not_come_back_goes_on_alone(tmp_path: Path) -> None:
    request = ScriptRequest(template="sweep", program=TRAIN, settings=(("a",), ("b",)))
    stage = Stage(tmp_path, "", request, requeue=0, hpcdp='echo "$@"; exit 75')
    said = stage.end()[1].splitlines()
    assert said[1].endswith(" b --run-dir runs/sweep-11/2 --resume auto")
    assert said[-1].endswith("resume with: cd /a\\ b && sbatch --array=2 /a\\ b/job.sh runs/sweep-11")


def test_a_task_of_a_sweep_has_its_line_and_is_requeued_alone(tmp_path: Path) -> None:
    request = ScriptRequest(template="sweep", program=("program", "x"), settings=(("a",), ("b  c", "d"), ("e",)))
    stage = Stage(tmp_path, 'printf "%s\\n" "$@"; exit 75', request)
    status, said = stage.end()
    assert status == 75 and said.splitlines()[1:4] == ["x", "b  c", "d"]
    assert stage.requeued == "requeue 11_2\n"
