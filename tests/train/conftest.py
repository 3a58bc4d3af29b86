"""A whole run, which costs seconds to start, is made once for the files that look at it."""

from pathlib import Path

import pytest
from train_command import RUN, train


@pytest.fixture(scope="session")
def finished(made_once) -> tuple[Path, str]:
    """The folder and the output of a run of two ranks."""

    def fill(folder: Path) -> None:
        done = train(folder, *RUN, "--trace", "traces/out.json")
        assert done.returncode == 0, done.stderr[-3000:]
        (folder / "shown").write_text(done.stdout)

    folder = made_once("finished-run", fill)
    return folder / "runs" / "mlp-digits-001", (folder / "shown").read_text()
