"""Tests of the pages on clusters: their transcript, and the examples of emulated clusters."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transcript

from bench_harness.cluster import SCRIPT

pytestmark = pytest.mark.cluster

DOCS = Path(__file__).resolve().parents[2] / "docs"


CHANGING = ("  slowest", "slowest rank", "stragglers", "critical path", "loading kernels")
"""Beginnings of lines whose presence, ranks and times depend on the run."""


def lasting(text: str) -> list[str]:
    """Return the lines without what differs from run to run or between processors.

    These are slow ranks, the last digits of losses, versions, cores, the places of line breaks, and all checkpoints but
    the last: a slow machine saves more of them.
    """
    text = re.sub(r"(^step  written.*\n)(?:.*\n)*(?= +225  )", r"\1", text, flags=re.M)
    lines = [line for line in re.sub(r"\n {4,}", " ", text).splitlines() if not line.startswith(CHANGING)]
    numbers = [re.sub(r"\d+(\.\d+)+%?", "N", line) for line in lines]
    return [re.sub(r"( node\d  )[\d,-]+ .*", r"\1", line) for line in numbers]


def test_a_first_job_goes_as_the_transcript_says(slurm_possible: None) -> None:
    assert lasting(transcript.made()) == lasting(transcript.TRANSCRIPT.read_text())


def blocks(language: str) -> list[str]:
    """The listings of the page on making clusters."""
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / "cluster-testing.md").read_text(), re.M | re.S)


def test_the_commands_that_make_a_cluster(hosts_possible: None, tmp_path: Path) -> None:
    (script,) = [block for block in blocks("sh") if "$cluster up" in block]
    script = script.replace("/var/tmp/mine", str(tmp_path / "cluster")).replace(
        "cluster=benchmarks/cluster.sh", f"cluster={SCRIPT}"
    )
    own = DOCS.parent
    if own.is_relative_to("/tmp") or own.is_relative_to("/run"):
        script = script.replace("up 3", f"up 3 --share {own}")
    if shutil.which("slurmctld") is None:
        script = "\n".join(line for line in script.splitlines() if not re.search(r" slurm$|sinfo|srun", line))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    try:
        done = subprocess.run(
            ["bash", "-eux", "-c", script], env=environment, capture_output=True, text=True, timeout=100
        )
    finally:
        subprocess.run(["bash", SCRIPT, "down"], env=environment | {"HPCDP_CLUSTER": str(tmp_path / "cluster")})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node2\n" in done.stdout
    assert not (tmp_path / "cluster").exists() or os.listdir(tmp_path / "cluster") == ["munge.key"]


def test_the_example_in_python(hosts_possible: None, tmp_path: Path) -> None:
    example, fixture = blocks("python")
    (tmp_path / "example.py").write_text(example)
    (tmp_path / "conftest.py").write_text(fixture)
    (tmp_path / "test_it.py").write_text(
        "def test_it(two_hosts):\n    assert two_hosts.on(2, ['true']).returncode == 0\n"
    )
    for command in (["example.py"], ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(SCRIPT.parent)},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
