"""What several files need: a whole run, which costs seconds to start and is made once, and small buckets."""

from pathlib import Path

import pytest
from train_command import RUN, train

from hpcdp.data_parallel import bucket_layout


@pytest.fixture(scope="session")
def finished(made_once) -> tuple[Path, str]:
    """The folder and the output of a run of two ranks."""

    def fill(folder: Path) -> None:
        done = train(folder, *RUN, "--trace", "traces/out.json")
        assert done.returncode == 0, done.stderr[-3000:]
        (folder / "shown").write_text(done.stdout)

    folder = made_once("finished-run", fill)
    return folder / "runs" / "mlp-digits-001", (folder / "shown").read_text()


@pytest.fixture
def one_bucket_each(monkeypatch):
    """For each parameter one, but for small ones that lie side by side."""
    module = "hpcdp.data_parallel.bucket_trainer.plan"
    monkeypatch.setattr(module, lambda params, cap, room_for: bucket_layout.plan(params, 1e-4, 1e-4, room_for))
