"""Run PyTorch's own tests of torch.distributed, which its wheel contains, over a backend.

    python tests/torch/upstream_suite.py --ranks 2 --backend hpcdp --name gloo

Each MPI rank is one rank of every test. The tests read the backend's ``--name`` to choose what they skip: under "gloo"
they test what gloo supports, under "mpi" all_to_all and more subgroups. A job that fails or hangs ends, and another one
continues with the next test. The tests are those of
``torch/testing/_internal/distributed/distributed_test.py``; they need ``pip install expecttest``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from datetime import timedelta
from pathlib import Path

LIMIT_S = 90
"""The longest time of one test."""
NOT_OURS = {
    "test_monitored_barrier_allreduce_hang": "asks for gloo by name",
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": "asks for gloo by name",
    "test_monitored_barrier_failure_order": "asks for gloo by name",
    "test_monitored_barrier_gloo": "asks for gloo by name",
    "test_monitored_barrier_gloo_rank_0_timeout": "asks for gloo by name",
    "test_monitored_barrier_gloo_subgroup": "asks for gloo by name",
    "test_monitored_barrier_wait_all_ranks": "asks for gloo by name",
    "test_get_backend": "compares the backend's name",
    "test_backend_full_group": "compares the backend's name",
    "test_backend_group": "compares the backend's name",
}


def load(name: str, ranks: int) -> type[unittest.TestCase]:
    """Return the class of the tests; sets the variables that its module reads."""
    folder = Path(os.environ["SUITE_FOLDER"])
    for part in ("barrier", "test_dir", "init_dir"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    os.environ.update(BACKEND=name, WORLD_SIZE=str(ranks), TEMP_DIR=str(folder))
    from torch.testing._internal import common_distributed
    from torch.testing._internal.common_utils import TestCase

    if ranks > 2:  # tests of parts of the ranks skip themselves below 8 ranks, and need 3
        common_distributed.skip_if_small_worldsize = lambda test: test
    from torch.testing._internal.distributed import distributed_test as upstream

    class Suite(TestCase, upstream.DistributedTest._DistTestBase):
        rank = int(os.environ.get("RANK", "0"))
        world_size = ranks
        file_name = str(folder / "file")

        @property
        def init_method(self) -> str:
            return f"file://{self.file_name}"

        def _barrier(self, *args: object, **kwargs: object) -> None:
            import torch.distributed as dist

            dist.barrier()

    return Suite


def work(arguments: argparse.Namespace) -> None:
    """Run the tests that the list names, on one rank, and write a line for each."""
    suite = load(arguments.name, arguments.ranks)
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    with open(f"{arguments.results}.{rank}", "a") as results:
        for number, name in enumerate(json.loads(arguments.worker)):
            signal.alarm(LIMIT_S)
            began = time.monotonic()
            if arguments.backend == "gloo":
                where = {"init_method": f"file://{arguments.results}.store{number}.{os.environ['SUITE_JOB']}"}
                where |= {"rank": rank, "world_size": arguments.ranks}
            else:
                where = {}
            dist.init_process_group(arguments.backend, timeout=timedelta(seconds=30), **where)
            dist.barrier()
            result = unittest.TestResult()
            status, text = "passed", ""
            try:
                suite(name).run(result)
            except SystemExit as error:  # a decorator's way to skip
                status, text = "skipped", f"exit {error.code}"
            if result.skipped:
                status, text = "skipped", result.skipped[0][1]
            for _, trace in result.errors + result.failures:
                status, text = ("skipped", "exit") if "SystemExit" in trace else ("failed", trace)
            record = {"test": name, "status": status, "text": text, "seconds": time.monotonic() - began}
            print(json.dumps(record), file=results, flush=True)
            if status == "failed":
                os._exit(3)
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
    signal.alarm(0)


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, object]]:
    """Run all tests in as many jobs as it takes, with their files in ``folder``; return a record for each."""
    os.environ["SUITE_FOLDER"] = str(folder)
    names = [name for name in unittest.TestLoader().getTestCaseNames(load(arguments.name, arguments.ranks))]
    if arguments.only:
        names = [name for name in names if any(part in name for part in arguments.only)]
    records: dict[str, dict[str, object]] = {}
    job = 0
    while remaining := [name for name in names if name not in records]:
        job += 1
        os.environ["SUITE_JOB"] = str(job)
        results = folder / f"job{job}"
        command = [
            Path(sys.executable).with_name("hpcdp"), "launch", "-n", arguments.ranks, "--", sys.executable, __file__,
            "--ranks", arguments.ranks, "--backend", arguments.backend, "--name", arguments.name,
            "--results", results, "--worker", json.dumps(remaining),
        ]  # fmt: skip
        environ = {key: value for key, value in os.environ.items() if key not in ("WORLD_SIZE", "RANK")}
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environ)
        by_rank = []
        for rank in range(arguments.ranks):
            file = Path(f"{results}.{rank}")
            lines = file.read_text().splitlines() if file.exists() else []
            by_rank.append({line["test"]: line for line in map(json.loads, lines)})
        for name in remaining:
            seen = [lines[name] for lines in by_rank if name in lines]
            failed = [line for line in seen if line["status"] == "failed"]
            if failed or len(seen) < arguments.ranks:
                text = failed[0]["text"] if failed else done.stdout[-1500:] + done.stderr[-3000:]
                records[name] = {"test": name, "status": "failed", "text": text}
                break
            records[name] = next((line for line in seen if line["status"] == "passed"), seen[0])
        if arguments.verbose:
            print(f"{len(records)} of {len(names)}", flush=True)
    return records


def main() -> int:
    """Run the tests, print a summary, and return 1 if a test failed that is expected to pass."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="hpcdp", help="the backend that is tested")
    parser.add_argument("--name", default="gloo", help="the backend's name in the tests: gloo or mpi")
    parser.add_argument("--only", nargs="*", help="parts of tests' names")
    parser.add_argument("--json", type=Path, help="a file for the records")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return 0
    with tempfile.TemporaryDirectory(prefix="hpcdp-suite-") as folder:
        records = run(arguments, Path(folder))
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=1))
    counts = {
        status: sum(r["status"] == status for r in records.values()) for status in ("passed", "skipped", "failed")
    }
    failed = {name: r for name, r in records.items() if r["status"] == "failed"}
    for name, record in failed.items():
        reason = NOT_OURS.get(name, str(record["text"]).strip().splitlines()[-1:])
        print(f"failed: {name}: {reason}")
    print(f"{arguments.backend} as {arguments.name}, {arguments.ranks} ranks: {counts}")
    return 1 if failed.keys() - NOT_OURS.keys() else 0


if __name__ == "__main__":
    sys.exit(main())
