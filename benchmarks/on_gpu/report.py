"""What `gpu` has measured: how it stands with the targets, and its part of RESULTS.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpcdp.bench.results import software
from hpcdp.devices import cuda_release

from ..reporting.markdown import table
from ..reporting.verdicts import Verdict
from . import jobs as gpu_jobs

Report = dict[str, Any]
"""What `gpu` writes: ``sums``, by job, the ``size`` of arrays, and of the job that measures alone, as far as it came,
``models``, ``kernels``, ``device`` and ``machine``."""

PARTS = frozenset({"sums", "size", "models", "kernels", "device", "machine"})
"""Of a report from which `section` can be made."""

_RATES = ("samples_s", "graphs_samples_s", "torch_samples_s", "torch_graphs_samples_s")


def verdicts(report: Report) -> list[Verdict]:
    """S13."""
    jobs, kernels = report["sums"], report.get("kernels", [])
    training = [each for each in jobs if each["case"] in ("training", "graphs")]
    behind_and_beside = [*training, *(each for each in jobs if each["case"] == "codes")]
    other = [each["name"] for each in behind_and_beside if gpu_jobs.failed(each)]
    bits = ", ".join(other) or "same bits" if behind_and_beside else None
    slower = [
        (each["seconds"]["beside"] / each["seconds"]["behind"], each["name"])
        for each in training
        if not gpu_jobs.failed(each)
    ]
    longest, name = max(slower, default=(0.0, ""))
    return [
        _rated("kernels: share of the device's copy", 0.85, kernels),
        _rated(
            "sum by ranks that share a GPU: share of a copy", 0.5,
            (each for each in jobs if each["case"] == "shared" and each["ranks"] > 1),
        ),
        _rated("staging: share of pinned copies", 0.9, (each for each in jobs if each["case"] == "staging")),
        Verdict("S13", "training with and without overlap", "same bits", bits, bits == "same bits"),
        Verdict(
            "S13", "training with overlap: a step against one without", "at most 1.05x",
            f"{longest:.2f}x at worst ({name})" if slower else None, bool(slower) and longest <= 1.05,
        ),
    ]  # fmt: skip


def _rated(what: str, least: float, rows: Iterable[dict[str, Any]]) -> Verdict:
    given, wanted = list(rows), f"at least {least:.0%}"
    failed = [row["name"] for row in given if "failed" in row]
    if failed:
        return Verdict("S13", what, wanted, f"failed: {', '.join(failed)}", False)
    shares = [(row["share"], row["name"]) for row in given]
    if not shares:
        return Verdict("S13", what, wanted, None, False)
    share, name = min(shares)
    held = sum(each >= least for each, _ in shares)
    text = f"{share:.0%} at worst ({name}); holds at {held} of {len(shares)}"
    return Verdict("S13", what, wanted, text, share >= least)


def section(report: Report) -> str:
    """The part of RESULTS.md in Markdown."""
    device, machine = report["device"], report["machine"]
    processor = machine["processor"]
    versions = [f"CUDA {cuda_release(device['cuda'])}", f"CuPy {device['cupy']}"]
    versions += [f"cuDNN {device['cudnn']}"] if device.get("cudnn") else []
    about = (
        f"{device['gpu']}, driver {device['driver']}, on {processor['cores']} cores of {processor['model']}: "
        f"`python -m hpcdp.benchmarks.gpu`, arrays of {report['size']}B. Ranks share the GPU; shares are those of the "
        "rate of its own copy, or of copies of pinned memory.\n\n"
        f"{', '.join([*versions, *software(machine)])}; commit {machine['commit']}, {machine['date']}.\n"
    )
    jobs = [[each["name"], _share(each), each.get("told") or each["failed"]] for each in report["sums"]]
    models = [
        [_title(each), *(f"{each[key]:,.0f}" if key in each else "-" for key in _RATES)] for each in report["models"]
    ]
    kernels = [[each["name"], f"{each['us']:.0f}", f"{each['gb_s']:.0f}", _share(each)] for each in report["kernels"]]
    tables = (
        table(["job", "share", "measured"], jobs),
        "Samples per second of forward, backward and update; PyTorch without TF32, cuDNN's engines measured by both.\n",
        table(["network", "hpcdp", "by CUDA graphs", "PyTorch", "by CUDA graphs"], models),
        "Kernels; after `all finite` the host waits each time.\n",
        table(["kernel", "us", "GB/s", "share"], kernels),
    )
    return "\n".join(["## A GPU\n", about, *tables])


def _title(model: dict[str, Any]) -> str:
    return f"{model['name']}, {model['dtype']}, batch {model['batch']}"


def _share(row: dict[str, Any]) -> str:
    return "" if row.get("share") is None else f"{row['share']:.2f}"


def line_of_model(model: dict[str, Any]) -> str:
    """A network's samples per second, and PyTorch's where those are known, as printed."""
    ours, theirs = ([f"{model[key]:>9.0f}" for key in keys if key in model] for keys in (_RATES[:2], _RATES[2:]))
    return f"{_title(model):<36}{''.join(ours)}" + f"{'':>11}{''.join(theirs)}" * bool(theirs)
