"""A stand-in for YARN and its distributed shell: ``hadoop.py yarn jar JAR CLASS OPTION...|application -kill ID``.

It refuses options that the client of Hadoop 3 does not have and values that they do not take. Containers are processes
with a folder, a session and a bare environment of their own; each runs a copy of the script, as from HDFS, and a kill
gives them the quarter of a second that YARN gives. ``HPCDP_TEST_YARN`` is where it keeps its applications;
``HPCDP_TEST_YARN_HOSTS``, a JSON list of commands, starts them elsewhere, one after the other by the next of them.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

NUMBER, WORD = "[0-9]+", r"\S+"
OPTIONS = {
    "jar": "/.*[.]jar", "shell_script": "/.*", "num_containers": NUMBER, "container_memory": NUMBER, "priority": NUMBER,
    "container_vcores": NUMBER, "queue": WORD, "appname": WORD, "timeout": NUMBER, "master_memory": NUMBER,
    "container_resources": r"[\w-]+=\d+\w*(,[\w-]+=\d+\w*)*", "node_label_expression": WORD,
}  # fmt: skip
CLIENT = "org.apache.hadoop.yarn.applications.distributedshell.Client"
GRACE_S = 0.25


def say(level: str, text: str) -> None:
    print(f"2026-11-22 13:10:01,000 {level} distributedshell.Client: {text}", file=sys.stderr, flush=True)


def jar(spool: Path, words: list[str]) -> int:
    archive, client, *words = words
    assert Path(archive).is_file() and client == CLIENT
    options: dict[str, str] = {}
    while words:
        name = words.pop(0)
        if name.lstrip("-") not in OPTIONS or not name.startswith("-"):
            say("ERROR", "Error running Client")
            print(f"org.apache.commons.cli.UnrecognizedOptionException: Unrecognized option: {name}", file=sys.stderr)
            return 1
        options[name.lstrip("-")] = words.pop(0)
        assert re.fullmatch(OPTIONS[name.lstrip("-")], options[name.lstrip("-")]), f"{name} {options}"
    assert int(options["timeout"]) < 2**31 and options["jar"] == archive
    if options.get("queue") == "closed":
        say("INFO", "Submitting application to ASM")
        say("ERROR", "Error running Client")
        print("YarnException: Failed to submit application_1_0001 to YARN : queue closed is STOPPED", file=sys.stderr)
        return 1
    application = f"application_1700000000000_{1 + len(list(spool.glob('application_*.json'))):04}"
    (spool / f"{application}.json").write_text(json.dumps(options))
    (spool / f"{application}.sh").write_text(Path(options["shell_script"]).read_text())
    say("INFO", f"Submitted application {application}")
    subprocess.Popen([sys.executable, __file__, "yarn", "manager", application], start_new_session=True)
    end = spool / f"{application}.end"
    while not end.exists():
        time.sleep(0.05)
    diagnostics = end.read_text()
    say("INFO", f"Got application report from ASM for, appId=1, appDiagnostics={diagnostics}, appMasterHost=node1")
    say(*(("ERROR", "Application failed to complete") if diagnostics else ("INFO", "Application completed")))
    return 2 if diagnostics else 0


def manager(spool: Path, words: list[str]) -> int:
    (application,) = words
    options = json.loads((spool / f"{application}.json").read_text())
    prefixes = json.loads(os.environ.get("HPCDP_TEST_YARN_HOSTS", "[[]]"))
    containers = []
    for number in range(int(options["num_containers"])):
        place = spool / application / f"container_{number + 2:06}"
        place.mkdir(parents=True)
        shutil.copy(spool / f"{application}.sh", place / "ExecScript.sh")
        environ = {
            "PATH": "/usr/bin:/bin",
            "HOME": "/root",
            "CONTAINER_ID": place.name,
            "YARN_SHELL_ID": str(number + 1),
        }
        environ |= {name: value for name, value in os.environ.items() if name == "HPCDP_CLUSTER"}
        with (place / "stdout").open("wb") as stdout, (place / "stderr").open("wb") as stderr:
            containers.append(
                subprocess.Popen(
                    [*prefixes[number % len(prefixes)], "/bin/bash", place / "ExecScript.sh"],
                    env=environ, cwd=place, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                    start_new_session=True,
                )
            )  # fmt: skip
        (place / "pid").write_text(str(containers[-1].pid))
    while any(container.poll() is None for container in containers) and not (spool / f"{application}.kill").exists():
        time.sleep(0.05)
    killed = (spool / f"{application}.kill").exists()
    for sign in (signal.SIGTERM, signal.SIGKILL) if killed else ():
        for container in containers:
            if container.poll() is None:
                os.killpg(container.pid, sign)
        time.sleep(GRACE_S)
    failed = [container.wait() for container in containers if container.wait() != 0]
    lost = f"Application Failure: desired = {len(containers)}, failed = {len(failed)}" if failed else ""
    (spool / f"{application}.new").write_text("Application was killed by user root" if killed else lost)
    (spool / f"{application}.new").rename(spool / f"{application}.end")
    return 0


def application(spool: Path, words: list[str]) -> int:
    option, name = words
    assert option == "-kill" and (spool / f"{name}.json").exists()
    (spool / f"{name}.kill").touch()
    return 0


if __name__ == "__main__":
    _, called, *arguments = sys.argv[1:]
    sys.exit(globals()[called](Path(os.environ["HPCDP_TEST_YARN"]), arguments))
