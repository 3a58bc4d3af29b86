#!/usr/bin/env python3
"""Slurm's commands for tests: sbatch, squeue, sacct, scontrol, scancel and srun, by the name it is called by.

They take only options that Slurm's own take, keep their jobs in a file, and answer as Slurm 22.05 does. Nothing runs.
"""

import json
import os
import re
import sys
from pathlib import Path

STATE = Path(os.environ["STANDIN_SLURM"])
VALUED = {
    "job-name", "nodes", "ntasks-per-node", "cpus-per-task", "partition", "account", "qos", "gres", "output",
    "constraint", "comment", "mem", "array", "signal", "open-mode", "time", "reservation",
}  # fmt: skip
BARE = {"requeue", "exclusive"}
CHECKS = {
    "nodes": r"[1-9]\d*",
    "ntasks-per-node": r"[1-9]\d*",
    "cpus-per-task": r"[1-9]\d*",
    "time": r"\d+(-\d+(:\d+){0,2}|(:\d+){1,2})?",
    "array": r"\d+-\d+(%\d+)?",
    "signal": r"([BR]:)?(USR1|\d+)(@\d+)?",
    "open-mode": "append|truncate",
    "partition": "main|long",
}


def refuse(text: str) -> None:
    sys.exit(f"{NAME}: error: {text}")


def arguments_of(line: str) -> list[str]:
    """As sbatch parts a line: quotes of either kind, and a backslash that counts within them, too."""
    found, word, quote, escaped, begun = [], "", "", False, False
    for letter in line:
        if escaped:
            word, escaped, begun = word + letter, False, True
        elif letter == "\\":
            escaped = True
        elif quote and letter == quote:
            quote = ""
        elif not quote and letter in "'\"":
            quote, begun = letter, True
        elif not quote and letter.isspace():
            if begun:
                found.append(word)
            word, begun = "", False
        elif not quote and letter == "#" and not begun:
            break
        else:
            word, begun = word + letter, True
    return [*found, word] if begun else found


def sbatch(arguments: list[str]) -> None:
    if arguments[:1] != ["--parsable"] or len(arguments) != 2:
        refuse(f"unrecognized arguments {arguments}")
    text = Path(arguments[1]).read_text()
    if not text.startswith("#!"):
        refuse("This does not look like a batch script.")
    said = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            for option in arguments_of(line[len("#SBATCH") :]):
                name, equals, value = option.removeprefix("--").partition("=")
                if not option.startswith("--") or name not in (VALUED if equals else BARE):
                    refuse(f"unrecognized option '{option}'")
                if not re.fullmatch(CHECKS.get(name, ".*"), value):
                    refuse(f"invalid {name} specified: {value}")
                said[name] = value
        elif line and not line.startswith("#"):
            break
    jobs = load()
    number = str(4711 + len(jobs))
    jobs[number] = {"name": said["job-name"], "state": "RUNNING", "said": said, "log": []}
    save(jobs)
    print(number)


def squeue(arguments: list[str]) -> None:
    if arguments[:2] != ["--noheader", "--format=%i|%T|%M|%R|%j"] or len(arguments) != 3:
        refuse(f"unrecognized arguments {arguments}")
    option, _, value = arguments[2].partition("=")
    jobs = load()
    if option == "--jobs":
        if value not in jobs:
            sys.exit("slurm_load_jobs error: Invalid job id specified")
        jobs = {value: jobs[value]}
    elif option != "--user" or value != str(os.getuid()):
        refuse(f"unrecognized option '{arguments[2]}'")
    for number, job in jobs.items():
        if job["state"] in ("RUNNING", "PENDING"):
            print(f"{number}|{job['state']}|1:02|node[1-2]|{job['name']}")


def sacct(arguments: list[str]) -> None:
    if os.environ.get("STANDIN_ACCOUNTS") != "yes":
        sys.exit("Slurm accounting storage is disabled")
    *_, which = arguments
    job = load().get(which.removeprefix("--jobs="))
    if job:
        print(f"{which.removeprefix('--jobs=')}|{job['state']}|00:01:02|0:0|{job['name']}")


def scontrol(arguments: list[str]) -> None:
    jobs = load()
    if arguments[:3] == ["--oneliner", "show", "job"]:
        job = jobs.get(arguments[3])
        if job is None or job["state"] == "FORGOTTEN":
            sys.exit("slurm_load_jobs error: Invalid job id specified")
        print(f"JobId={arguments[3]} JobName={job['name']} JobState={job['state']} ExitCode=0:0 RunTime=00:01:02")
    elif arguments[:2] == ["show", "job"]:
        print(f"   JobState={jobs[arguments[2]]['state']}\n   StdOut={Path.cwd() / 'out of'} {arguments[2]}")
    elif arguments[0] == "update" and arguments[2] == "Requeue=0":
        jobs[arguments[1].removeprefix("JobId=")]["log"].append("no requeue")
        save(jobs)
    else:
        refuse(f"unrecognized arguments {arguments}")


def scancel(arguments: list[str]) -> None:
    jobs = load()
    if arguments[:2] == ["--batch", "--signal=USR1"]:
        job = jobs[arguments[2]]
        job["log"].append("USR1")
        job["state"] = "FAILED"  # it has saved, and ended with 75
    else:
        for number in arguments:
            jobs[number]["log"].append("cancel")
            if jobs[number]["state"] == "RUNNING":
                jobs[number]["state"] = "CANCELLED"
    save(jobs)


def srun(arguments: list[str]) -> None:
    if arguments == ["--mpi=list"]:
        print(os.environ.get("STANDIN_MPI", "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin "
                                            "versions available: pmix_v4"))  # fmt: skip
    else:
        refuse(f"unrecognized arguments {arguments}")


def load() -> dict[str, dict]:
    return json.loads(STATE.read_text()) if STATE.exists() else {}


def save(jobs: dict[str, dict]) -> None:
    STATE.write_text(json.dumps(jobs))


if __name__ == "__main__":
    NAME = Path(sys.argv[0]).name
    {"sbatch": sbatch, "squeue": squeue, "sacct": sacct, "scontrol": scontrol, "scancel": scancel, "srun": srun}[NAME](
        sys.argv[1:]
    )
