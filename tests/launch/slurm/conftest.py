"""A folder first on PATH with stand-ins for Slurm's commands."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMMANDS = Path(__file__).with_name("slurm_commands.py")
Jobs = Callable[..., dict[str, Any]]


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """Puts the stand-ins on PATH, moves to an empty folder, and tells the jobs, after it has changed those given."""
    binaries, state = tmp_path / "bin", tmp_path / "state.json"
    binaries.mkdir()
    (tmp_path / "work").mkdir()
    for name in ("sbatch", "squeue", "sacct", "scontrol", "scancel"):
        (binaries / name).write_text(COMMANDS.read_text().replace("/usr/bin/env python3", sys.executable, 1))
        (binaries / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")
    monkeypatch.setenv("STANDIN_SLURM", str(state))
    monkeypatch.chdir(tmp_path / "work")
    Path("hpcdp-site.toml").write_text('mpi_type = "pmix"\ntime = "1:00:00"\npartition = "main"\n')

    def jobs(**changed: dict[str, Any]) -> dict[str, Any]:
        found = json.loads(state.read_text()) if state.exists() else {}
        for number, values in changed.items():
            blank = {"name": "x", "state": "RUNNING", "said": {}, "log": []}
            found[number.removeprefix("job")] = blank | values
        state.write_text(json.dumps(found))
        return found

    return jobs
