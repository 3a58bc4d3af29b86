"""Which tests a run takes, what it records for the summary, and how a failing or hanging rank ends the others.

Without ``--with-mpi`` the tests marked ``mpi`` are left out; under ``mpirun ... --with-mpi --only-mpi`` all others are
(pytest-mpi 0.6 takes the second option only without the first). ``--alone`` parts the tests marked ``alone`` from those
that bear others beside them. A run of few tests imports only the files that name their marker.
"""

import faulthandler
import fcntl
import gc
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import hypothesis
import pytest
from pairs import thorough_of

from hpcdp.core.environment import launched_rank, launched_ranks

RANK, SIZE = launched_rank() or 0, launched_ranks() or 1
ON_GPU = os.environ.get("HPCDP_TEST_GPU", "") not in ("", "0")
THOROUGH = os.environ.get("HPCDP_TEST_THOROUGH", "") not in ("", "0")
TEST_LIMIT_S = float(os.environ.get("HPCDP_TEST_LIMIT_S", 900 if THOROUGH else 300))
"""Of a test that hangs; one that compiles kernels where none are kept, beside others that do, takes two minutes."""
CLUSTER_LIMIT_S = 2 * TEST_LIMIT_S
"""Of a test on hosts that are made for it: jobs wait in queues, and limits of their own end them before."""

REPORT = os.environ.get("HPCDP_TEST_REPORT")
WITHOUT_KERNELS = {"launch", "slurm", "checkpoint", "data", "tests"}
"""Folders of whose tests few need kernels."""

os.environ.setdefault("HPCDP_SILENCE_S", "0")  # a busy machine explains a silence in tests that expect no words
hypothesis.settings.register_profile("hpcdp", deadline=None)
hypothesis.settings.load_profile("hpcdp")
_torch = importlib.util.find_spec("torch")
if _torch is None or _torch.origin is None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # or tests/torch is found: a folder without __init__.py
if SIZE > 1:  # pytests that share a root for temporary folders fail now and then where another has cleared it
    _root = Path(tempfile.gettempdir(), f"pytest-ranks-of-{os.getuid()}", str(RANK))
    _root.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(_root)
Fill = Callable[[Path], None]
_terminal = _stacks = 2
_report: TextIO | None = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--alone", choices=("also", "only", "not"), default="also", help="tests marked `alone`")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    global _terminal, _report, _stacks
    _terminal = _stacks = os.dup(2)  # nothing is captured yet
    if REPORT:
        process = config.workerinput["workerid"] if hasattr(config, "workerinput") else RANK
        _report = open(f"{REPORT}.{process}", "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        _stacks = os.open(f"{REPORT}-stacks.{process}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.enable(_stacks)
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "MPIPlugin":
            plugin._is_testing_mpi = False  # it would print forty lines about MPI after each run
    if RANK > 0:
        config.pluginmanager.unregister(name="terminalreporter")


def _only(config: pytest.Config) -> str | None:
    """The marker of all tests of this run."""
    return "mpi" if config.getoption("--only-mpi") else "alone" if config.getoption("--alone") == "only" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    only = _only(config)
    if only is None or collection_path.suffix != ".py":
        return None
    if collection_path in (Path(argument.partition("::")[0]).resolve() for argument in config.args):
        return None  # pytest says that what was asked for by name is not there
    return f"mark.{only}".encode() not in collection_path.read_bytes() or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and ten thousand tests stay until the end: it would cost seconds to look through them for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only, with_mpi, alone = _only(config), config.getoption("--with-mpi"), config.getoption("--alone")
    unwanted = []
    for item in items:
        marks = {name for name in ("mpi", "alone") if item.get_closest_marker(name)}
        if item.get_closest_marker("thorough") and not THOROUGH:
            item.add_marker(pytest.mark.skip(reason="long: make test-thorough runs it"))
        sizes = item.get_closest_marker("ordinary_ranks")
        if sizes and SIZE not in sizes.args and not THOROUGH:
            item.add_marker(pytest.mark.skip(reason="other numbers of ranks show it: make test-thorough runs it"))
        for name in marks:
            if f"mark.{name}" not in item.path.read_text(encoding="utf-8"):
                raise pytest.UsageError(f"{item.nodeid}: its own file must say mark.{name}")
        if only not in marks if only else ("mpi" in marks and not with_mpi) or ("alone" in marks and alone == "not"):
            unwanted.append(item)
    if not THOROUGH:
        unwanted += thorough_of(items)
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        out = set(unwanted)
        items[:] = [item for item in items if item not in out]
    if hasattr(config, "workerinput"):
        items[:] = _spread(items, config.workerinput["workercount"])


def _spread(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The order in which the first of equal shares, one for each worker, begins with tests that need kernels, and the
    others with tests that do not: one process compiles at a time, and others wait for it."""
    without = [item for item in items if item.path.parent.name in WITHOUT_KERNELS]
    others = [item for item in items if item.path.parent.name not in WITHOUT_KERNELS]
    size, found = -(-len(items) // workers), others[: len(items) // workers]
    del others[: len(found)]
    for left in range(workers - 1, 0, -1):
        first = without[: len(without) // left]
        rest = others[: max(0, size - len(first))] if left > 1 else others
        found += first + rest
        del without[: len(first)], others[: len(rest)]
    return found + without


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    _record(item.nodeid, "started")
    limit_s = CLUSTER_LIMIT_S if item.get_closest_marker("cluster") else TEST_LIMIT_S
    faulthandler.dump_traceback_later(limit_s, exit=True, file=_stacks)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if nextitem is None or nextitem.path != item.path:
            _keep_what_is_there()


def _keep_what_is_there() -> None:
    """What a file's tests have imported stays, too: else each later collection of garbage would look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def made_once(
    tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Callable[[str, Callable[[Path], None]], Path]:
    """A folder of a name that is filled once for all workers: by the first that asks for it, and the others wait."""
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent

    def once(name: str, fill: Callable[[Path], None]) -> Path:
        folder, done = base / name, base / f"{name}.done"
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a try that has failed
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return once


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
    if _report:
        _report.write(json.dumps({"test": nodeid, "outcome": outcome, "reason": reason}) + "\n")


def _end_all_ranks(what: str, traceback: str) -> None:
    """Ranks that wait for this one would wait for ever. Rank 0 speaks first, alone where all ranks failed alike."""
    if SIZE == 1:
        return
    from mpi4py import MPI

    time.sleep(0.3 * (RANK > 0))
    sys.stdout.flush()
    os.write(_terminal, f"\n=== rank {RANK} of {SIZE} failed: {what}\n{traceback}\n".encode())
    MPI.COMM_WORLD.Abort(1)


@pytest.fixture(params=[0, 1])
def gpus_on_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """CuPy's place taken by `gpu_on_host`, whose streams take turns in some order."""
    import gpu_on_host

    with gpu_on_host.installed(monkeypatch, request.param) as gpus:
        yield gpus


@pytest.fixture
def graphs_on_host() -> Iterator[object]:
    """CuPy's place taken by `gpu_on_host.graphs`, which captures CUDA graphs."""
    from gpu_on_host import graphs

    with graphs.installed() as machine:
        yield machine


@pytest.fixture
def counted_graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """CUDA graphs, on a GPU with ``HPCDP_TEST_GPU=1`` (``make test-gpu``), else `graphs_on_host`.

    ``graphs`` has one for each capture, ``launches`` for each launch.
    """
    if ON_GPU:
        cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]'")
        cupy.ndarray.to_host = cupy.ndarray.get  # as the stand-in's
    else:
        request.getfixturevalue("graphs_on_host")
    from hpcdp.kernels.cuda import Capturer, CudaGraph

    counted = SimpleNamespace(graphs=[], launches=[])
    capture, launch = Capturer.capture, CudaGraph.launch

    def capturing(self: Capturer, function: Callable[[], object]) -> CudaGraph:
        graph = capture(self, function)
        counted.graphs.append(graph)  # ranks that are threads may add theirs at once
        return graph

    def launching(self: CudaGraph) -> None:
        launch(self)
        counted.launches.append(self)

    monkeypatch.setattr(Capturer, "capture", capturing)
    monkeypatch.setattr(CudaGraph, "launch", launching)
    return counted


@pytest.fixture
def gpu(counted_graphs: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """`counted_graphs`, where what goes without a graph is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield counted_graphs
