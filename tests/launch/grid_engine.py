"""A stand-in for Grid Engine's commands on one machine: ``grid_engine.py qsub|qstat|qdel|qacct ARGUMENT...``.

It refuses options that qsub does not have, values that they do not take, and parallel environments that are not those
of the site; a job gets a bare environment, its signals come to its whole process group, and status 99 starts it again,
as with Grid Engine. ``HPCDP_TEST_GRID`` is where it keeps its jobs.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

FLAGS = {"-terse", "-notify", "-hard", "-soft", "-cwd", "-V"}
VALUES = {
    "-o": "/.*", "-e": "/.*", "-S": "/.*", "-wd": "/.*", "-N": "[A-Za-z_][^/:@*? ]*", "-r": "[yn]", "-b": "[yn]",
    "-j": "[yn]", "-q": "[a-z.@]+", "-l": r"\w+(=\S+)?(,\w+(=\S+)?)*", "-P": r"\w+", "-p": "-?[0-9]+", "-m": "[beasn]+",
}  # fmt: skip
ENVIRONMENTS = {"mpi"}
NOTIFY_S = 1.0


def refuse(why: str) -> None:
    sys.exit(f"Unable to run job: {why}.\nExiting.")


def parse(words: list[str], found: dict) -> list[str]:
    while words and words[0].startswith("-"):
        name = words.pop(0)
        if name in FLAGS:
            found[name] = "y"
        elif name == "-pe":
            environment, slots = words.pop(0), words.pop(0)
            if environment not in ENVIRONMENTS:
                refuse(f'the specified parallel environment "{environment}" does not exist')
            found[name] = int(slots)
        elif name in VALUES and words and re.fullmatch(VALUES[name], words[0]):
            found[name] = words.pop(0)
        else:
            refuse(f"Unknown option {name} {words[:1]}")
    return words


def qsub(spool: Path, words: list[str]) -> None:
    command: dict = {}
    (script,) = parse(words, command)
    text = Path(script).read_text()
    options: dict = {}
    for line in re.findall(r"^#\$ (.*)$", text, re.M):
        if parse(shlex.split(line), options):
            refuse(f"in {script}: {line}")
    options |= command  # what the command line says goes before what the script says
    if {"-o", "-e", "-S", "-notify", "-r"} - set(options):
        sys.exit(f"the job lacks an option: {options}")
    number = str(7001 + len(list(spool.glob("*.json"))))
    (spool / f"{number}.json").write_text(json.dumps(options))
    (spool / f"{number}.sh").write_text(text)  # as Grid Engine does
    (spool / f"{number}.running").touch()
    shepherd = [sys.executable, __file__, "shepherd", number]
    quiet = {name: subprocess.DEVNULL for name in ("stdin", "stdout", "stderr")}
    subprocess.Popen(shepherd, start_new_session=True, **quiet)
    print(number)


def shepherd(spool: Path, words: list[str]) -> None:
    (number,) = words
    options = json.loads((spool / f"{number}.json").read_text())
    hosts = spool / f"{number}.hosts"
    slots, name = options.get("-pe", 1), socket.gethostname()
    halves = [slots - slots // 2, slots // 2]  # a host may come twice, for two queues
    hosts.write_text("".join(f"{name} {half} q{half}@{name} UNDEFINED\n" for half in halves if half))
    environment = {"HOME": str(spool), "PATH": "/usr/bin:/bin", "JOB_ID": number, "HPCDP_TEST_SPOOL": str(spool)}
    environment |= {"PE_HOSTFILE": str(hosts)} if "-pe" in options else {}
    failed, status = "0", 99
    while status == 99 and failed == "0":
        with open(options["-o"], "ab") as output, open(options["-e"], "ab") as errors:
            job = subprocess.Popen(
                [options["-S"], spool / f"{number}.sh"], env=environment, stdin=subprocess.DEVNULL, cwd=spool,
                stdout=output, stderr=errors, start_new_session=True,
            )  # fmt: skip
        delete_s = float("inf")
        while job.poll() is None:
            time.sleep(0.05)
            for sign in (signal.SIGUSR1, signal.SIGUSR2):
                if (spool / f"{number}.{sign.name}").exists():
                    (spool / f"{number}.{sign.name}").unlink()
                    os.killpg(job.pid, sign)
            if (spool / f"{number}.delete").exists() and delete_s == float("inf"):
                os.killpg(job.pid, signal.SIGUSR2)
                failed, delete_s = "100 : assumedly after job", time.monotonic() + NOTIFY_S
            if (spool / f"{number}.kill").exists() or time.monotonic() > delete_s:
                failed = "37  : qmaster enforced h_rt limit" if failed == "0" else failed
                os.killpg(job.pid, signal.SIGKILL)
        status = job.returncode if job.returncode >= 0 else 128 - job.returncode
        with (spool / f"{number}.account").open("a") as account:
            account.write(f"==========\njobnumber    {number}\nfailed       {failed}    \nexit_status  {status}   \n")
    (spool / f"{number}.running").unlink()


def qstat(spool: Path, words: list[str]) -> None:
    option, number = words
    assert option == "-j"
    if not (spool / f"{number}.running").exists():
        sys.exit(f"Following jobs do not exist or permissions are not sufficient: \n{number}")
    print(f"====\njob_number:                 {number}")
    if (spool / f"{number}.error").exists():
        print("error reason    1:          11/22/2026 13:10:01 [0:1]: can't open output file")


def qdel(spool: Path, words: list[str]) -> None:
    (number,) = words
    if (spool / f"{number}.error").exists():
        (spool / f"{number}.kill").touch()
    (spool / f"{number}.delete").touch()
    print(f"{os.environ.get('USER', 'root')} has registered the job {number} for deletion")


def qacct(spool: Path, words: list[str]) -> None:
    option, number = words
    assert option == "-j"
    account = spool / f"{number}.account"
    print(account.read_text() if account.exists() else f"error: job id {number} not found")


if __name__ == "__main__":
    called, *arguments = sys.argv[1:]
    globals()[called](Path(os.environ["HPCDP_TEST_GRID"]), arguments)
