"""Which tests a run takes, what it records for the summary, and how a failing or hanging rank ends the others.

Without ``--with-mpi`` the tests marked ``mpi`` are left out; under ``mpirun ... --with-mpi --only-mpi`` all others are
(pytest-mpi 0.6 takes the second option only without the first).
"""

import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterator

import hypothesis
import pytest

from hpcdp.launch.local import launched_rank, launched_ranks

RANK, SIZE = launched_rank() or 0, launched_ranks() or 1
TEST_LIMIT_S = float(os.environ.get("HPCDP_TEST_LIMIT_S", 120))
REPORT = os.environ.get("HPCDP_TEST_REPORT")

hypothesis.settings.register_profile("hpcdp", deadline=None)
hypothesis.settings.load_profile("hpcdp")
_terminal = 2


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    global _terminal
    _terminal = os.dup(2)  # nothing is captured yet
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "MPIPlugin":
            plugin._is_testing_mpi = False  # it would print forty lines about MPI after each run
    if RANK > 0:
        config.pluginmanager.unregister(name="terminalreporter")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    with_mpi = config.getoption("--with-mpi") or config.getoption("--only-mpi")
    unwanted = [
        item
        for item in items
        if (not with_mpi if item.get_closest_marker("mpi") else bool(config.getoption("--only-mpi")))
    ]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if item not in unwanted]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _record(item.nodeid, "started")
    faulthandler.dump_traceback_later(TEST_LIMIT_S, exit=True, file=_terminal)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _record(report.nodeid, "failed")
        _end_all_ranks(f"{report.nodeid} ({report.when})", report.longreprtext)
    elif report.skipped:
        reason = report.wasxfail if hasattr(report, "wasxfail") else report.longrepr[2]
        _record(report.nodeid, "skipped", reason.removeprefix("Skipped: "))
    elif report.when == "call":
        _record(report.nodeid, "passed")
    elif report.when == "teardown":
        _record(report.nodeid, "ended")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _record(report.nodeid, "failed")
        _end_all_ranks(f"collecting {report.nodeid}", report.longreprtext)


def _record(nodeid: str, outcome: str, reason: str = "") -> None:
    """One line for tests/run.py, written at once, so that it survives whatever ends this process."""
    if REPORT:
        with open(f"{REPORT}.{RANK}", "a", encoding="utf-8") as file:
            file.write(json.dumps({"test": nodeid, "outcome": outcome, "reason": reason}) + "\n")


def _end_all_ranks(what: str, traceback: str) -> None:
    """Ranks that wait for this one would wait for ever. Rank 0 speaks first, alone where all ranks failed alike."""
    if SIZE == 1:
        return
    from mpi4py import MPI

    time.sleep(0.3 * (RANK > 0))
    sys.stdout.flush()
    os.write(_terminal, f"\n=== rank {RANK} of {SIZE} failed: {what}\n{traceback}\n".encode())
    MPI.COMM_WORLD.Abort(1)
