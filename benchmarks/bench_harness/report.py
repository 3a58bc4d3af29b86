"""RESULTS.md from what the jobs reported: the targets and their verdicts, the tables, and the part of `bench_gpu`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bench_harness.verdicts import (
    Verdict,
    allreduce_rounds,
    convolution_rows,
    hybrid_rows,
    kernel_names,
    median,
    median_by_size,
    of_kernel,
    overlapped_places,
    peer_names,
    torch_places,
    update_rounds,
    verdicts,
    where,
)
from hpcdp.bench.measure import format_size
from hpcdp.core.arrays import cuda_release


def software(machine: dict[str, Any]) -> list[str]:
    """Return texts with the versions of Python and of packages, from the result of `describe`."""
    return [f"Python {machine['python']}", *(f"{name} {version}" for name, version in machine["versions"].items())]


def table(heading: list[str], rows: Iterable[list[str]]) -> str:
    """Return a Markdown table, with a final newline."""
    lines = ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def of_targets(verdicts: Iterable[Verdict]) -> str:
    """Return a table with a line for each verdict."""
    rows = []
    for verdict in verdicts:
        word = "-" if verdict.measured is None else "met" if verdict.met else "**missed**"
        rows.append([verdict.target, verdict.what, verdict.wanted, verdict.measured or "not measured", word])
    return table(["", "what", "target", "measured", ""], rows)


Report = dict[str, Any]
"""What `bench_gpu` writes: ``sums``, by job, the ``size`` of arrays, and of `bench_gpu_alone`, as far as it came,
``models``, ``kernels``, ``device`` and ``machine``."""

GPU_PARTS = frozenset({"sums", "size", "models", "kernels", "device", "machine"})
"""Of a report from which `gpu_section` can be made."""

_RATES = ("samples_s", "graphs_samples_s", "torch_samples_s", "torch_graphs_samples_s", "torch_compiled_samples_s")


def gpu_verdicts(report: Report) -> list[Verdict]:
    """S13."""
    jobs, kernels = report["sums"], report.get("kernels", [])
    training = [job for job in jobs if job["case"] in ("training", "graphs")]
    scheduled = [*training, *(job for job in jobs if job["case"] == "codes")]
    other = [job["name"] for job in scheduled if failed(job)]
    bits = ", ".join(other) or "same bits" if scheduled else None
    slower = [(job["seconds"]["during"] / job["seconds"]["after"], job["name"]) for job in training if not failed(job)]
    longest, name = max(slower, default=(0.0, ""))
    return [
        _rated("kernels: share of the device's copy", 0.85, kernels),
        _rated(
            "sum by ranks that share a GPU: share of a copy", 0.5,
            (job for job in jobs if job["case"] == "shared" and job["ranks"] > 1),
        ),
        _rated("staging: share of pinned copies", 0.9, (job for job in jobs if job["case"] == "staging")),
        Verdict("S13", "training with and without overlap", "same bits", bits, bits == "same bits"),
        Verdict(
            "S13", "training with overlap: a step against one without", "at most 1.05x",
            f"{longest:.2f}x at worst ({name})" if slower else None, bool(slower) and longest <= 1.05,
        ),
    ]  # fmt: skip


def _rated(what: str, least: float, rows: Iterable[dict[str, Any]]) -> Verdict:
    rows, wanted = list(rows), f"at least {least:.0%}"
    failed = [row["name"] for row in rows if "failed" in row]
    if failed:
        return Verdict("S13", what, wanted, f"failed: {', '.join(failed)}", False)
    shares = [(row["share"], row["name"]) for row in rows]
    if not shares:
        return Verdict("S13", what, wanted, None, False)
    share, name = min(shares)
    reached = sum(share >= least for share, _ in shares)
    text = f"{share:.0%} at worst ({name}); holds at {reached} of {len(shares)}"
    return Verdict("S13", what, wanted, text, share >= least)


def gpu_section(report: Report) -> str:
    """Return the section of RESULTS.md about the GPU."""
    device, machine = report["device"], report["machine"]
    processor = machine["processor"]
    versions = [f"CUDA {cuda_release(device['cuda'])}", f"CuPy {device['cupy']}"]
    versions += [f"cuDNN {device['cudnn']}"] if device.get("cudnn") else []
    about = (
        f"{device['gpu']}, driver {device['driver']}, on {processor['cores']} cores of {processor['model']}: "
        f"`python benchmarks/bench_gpu.py`, arrays of {report['size']}B. Ranks share the GPU; shares are those of the "
        "rate of its own copy, or of copies of pinned memory.\n\n"
        f"{', '.join([*versions, *software(machine)])}; commit {machine['commit']}, {machine['date']}.\n"
    )
    jobs = [[job["name"], _share(job), job.get("summary") or job["failed"]] for job in report["sums"]]
    models = [[_title(row), *(f"{row[key]:,.0f}" if key in row else "-" for key in _RATES)] for row in report["models"]]
    kernels = [[row["name"], f"{row['us']:.0f}", f"{row['gb_s']:.0f}", _share(row)] for row in report["kernels"]]
    tables = (
        table(["job", "share", "measured"], jobs),
        "Samples per second of forward, backward and update; PyTorch without TF32, cuDNN's engines measured by both.\n",
        table(["network", "hpcdp", "by CUDA graphs", "PyTorch", "by CUDA graphs", "torch.compile"], models),
        "Kernels; after `all finite` the host waits each time.\n",
        table(["kernel", "us", "GB/s", "share"], kernels),
    )
    return "\n".join(["## A GPU\n", about, *tables])


def _title(model: dict[str, Any]) -> str:
    return f"{model['name']}, {model['dtype']}, batch {model['batch']}"


def _share(row: dict[str, Any]) -> str:
    return "" if row.get("share") is None else f"{row['share']:.2f}"


def line_of_model(model: dict[str, Any]) -> str:
    """Format a network's samples per second, and PyTorch's if they are known, or why not."""
    ours, theirs = ([f"{model[key]:>9.0f}" for key in keys if key in model] for keys in (_RATES[:2], _RATES[2:]))
    failed = f"  PyTorch: {model['torch_failed']}" if "torch_failed" in model else ""
    return f"{_title(model):<36}{''.join(ours)}" + f"{'':>11}{''.join(theirs)}" * bool(theirs) + failed


def failed(row: Mapping[str, Any]) -> bool:
    """Return whether a job has no figures, or wrong ones."""
    return "failed" in row or bool(row["wrong"])


def _fabric_table(fabric: dict[str, Any]) -> str:
    link = fabric["link_mb_s"]
    names = list(fabric["rows"][0]["median_ms"])
    text = (
        f"## Allreduce over {fabric['hosts']} hosts x {fabric['ranks_per_node']} ranks, links of {fabric['rate']}\n\n"
    )
    text += f"Milliseconds, and the share of the bound. {fabric['library']} measured {link['one_way']:.1f} MB/s on the "
    text += f"link, {link['both_ways']:.1f} in each direction at once.\n\n"
    rows = [
        [
            format_size(row["nbytes"]),
            f"{row['bound_ms']:.2f}",
            *(f"{row['median_ms'][name]:.2f} ({100 * row['bound_share'][name]:.0f}%)" for name in names),
        ]
        for row in fabric["rows"]
    ]
    return text + table(["size", "bound", *names], rows)


def _ingress_table(report: dict[str, Any]) -> str:
    """Return the table of the links' use by asynchronous stores, and of the traffic into each of n servers."""
    link = report["link"]
    text = f"## Asynchronous store over hosts, links of {report['rate']}\n\n"
    text += f"Two hosts, {link['keys']} keys of 1 MB in flight; payload in each direction. The link carried "
    text += f"{link['link_mb_s']['one_way']:.1f} MB/s, {link['link_mb_s']['both_ways']:.1f} each way at once.\n\n"
    rows = [[name, f"{mb_s:.1f}", f"{100 * link['share'][name]:.0f}%"] for name, mb_s in link["mb_s"].items()]
    text += table(["", "MB/s", "of the link"], rows)
    text += f"\n{report['workers']} workers push {format_size(report['nbytes'])} each a round.\n\n"
    rows = [
        [
            str(row["servers"]),
            ", ".join(f"{mb:.1f}" for mb in row["received_mb"]),
            f"{row['expected_mb']:.1f}",
            f"{row['round_ms']:.0f}",
            f"{row['bound_ms']:.0f}",
        ]
        for row in report["rows"]
    ]
    return text + table(["servers", "MB in at each", "m S / n", "ms a round", "the slowest link needs"], rows)


def _checkpoint_table(report: dict[str, Any]) -> str:
    """Return the table of saving and loading by each candidate, and of asynchronous saves."""
    text = f"## Checkpoint of {format_size(report['nbytes'])} by {report['ranks']} ranks\n\n"
    text += "Milliseconds, GB/s of the state, and the time of raw files over that of the candidate.\n\n"
    rows = [
        [f"{what}, {name}", f"{1e3 * seconds:.0f}", f"{report['nbytes'] / seconds / 1e9:.2f}", f"{ratio:.2f}"]
        for what, ratios in report["ratio"].items()
        for name, ratio in ratios.items()
        for seconds in [report["median_s"][what][name]]
    ]
    rows += [[name, f"{1e3 * seconds:.0f}", "", ""] for name, seconds in report["median_s"]["stop"].items()]
    return text + table(["", "ms", "GB/s", "of raw"], rows)


def _overlap_table(places: list[dict[str, Any]]) -> str:
    """Return the table of steps in each schedule, of computation alone and the critical path, by place and model."""
    text = "## Overlap\n\nMilliseconds a step; in brackets the communication that was exposed. Reductions are those of "
    text += (
        "all buckets, one after the other with nothing else; the critical path follows from them and from computation. "
    )
    text += "Messages and sums take processor time, too: where no core is to spare, from computation.\n\n"
    rows = []
    for place in places:
        for row in place["rows"]:
            cells = [f"{row['step_ms'][name]:.1f} ({ms:.1f})" for name, ms in row["exposed_ms"].items()]
            cells += [f"{row[key]:.1f}" for key in ("compute_ms", "reductions_ms", "critical_path_ms")]
            cells.append(f"{max(row['beside_ms'].values()):.1f}")
            rows.append([f"{row['model']}, {where(place)}", *cells])
    names = list(places[0]["rows"][0]["exposed_ms"])
    return text + table(["", *names, "computation", "reductions", "critical path", "processor time meanwhile"], rows)


def _torch_table(places: list[dict[str, Any]]) -> str:
    """Return the table of times of a step by each candidate, by place, model and batch."""
    names = list(places[0]["rows"][0]["step_ms"])
    text = "## PyTorch models\n\nMilliseconds a step, of the slowest rank.\n\n"
    rows = [
        [f"{row['model']}, batch {row['batch']}, {where(place)}", *(f"{row['step_ms'][name]:.1f}" for name in names)]
        for place in places
        for row in place["rows"]
    ]
    return text + table(["", *names], rows)


def _hybrid_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of times of a call by each candidate, by network."""
    text = "## Calls with and without a plan, on one core\n\nMicroseconds a call.\n\n"
    return text + _microseconds(rows, [", with backward" * row["backward"] for row in rows])


def _steps_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of times of a step by each candidate, by network."""
    text = (
        "## Steps of training with and without a plan, on one core\n\nMicroseconds a step: forward, backward, update."
    )
    return f"{text}\n\n{_microseconds(rows, [''] * len(rows))}"


def _microseconds(rows: list[dict[str, Any]], what: list[str]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["median_us"]))
    lines = [
        [
            f"{row['network']}, batch {row['batch']}{more}",
            *(f"{row['median_us'][name]:.1f}" if name in row["median_us"] else "-" for name in names),
        ]
        for row, more in zip(rows, what, strict=True)
    ]
    return table(["", *names], lines)


def _convolution_table(results: dict[str, Any]) -> str:
    """Return the table of times by each candidate, by layer and pass."""
    layers = convolution_rows(results)
    names = list(next(iter(layers.values()))[0]["median_us"])
    text = "## Convolutions on one core\n\nMicroseconds; the product is the bare one that a pass comes down to.\n\n"
    lines = [
        [f"{layer}: {row['pass']}", f"{row['gflop_s']:.0f}", *(f"{row['median_us'][name]:.0f}" for name in names)]
        for layer, rows in layers.items()
        for row in rows
    ]
    return text + table(["", "GFLOP/s", *names], lines)


def _kernel_table(results: dict[str, Any]) -> str:
    rounds = results["kernels"]
    sizes = sorted({row["nbytes"] for report in rounds for row in report["rows"]})
    rows = []
    for name in kernel_names(results):
        cells = [name]
        for key in ("gb_s", "share", "peer_ratio"):
            by_size = median_by_size(rounds, of_kernel(name, key))
            cells += [f"{by_size[size]:.{1 if key == 'gb_s' else 2}f}" if size in by_size else "-" for size in sizes]
        rows.append(cells)
    heading = [f"{what}, {format_size(size)}" for what in ("GB/s", "of copy", "peer's time") for size in sizes]
    return table(["kernel", *heading], rows)


def _medians(rounds: list[dict[str, Any]]) -> str:
    columns = {name: median_by_size(rounds, median(name)) for name in peer_names(rounds, ())}
    sizes = sorted({nbytes for column in columns.values() for nbytes in column})
    lines = _lines(rounds)
    rows = [
        [format_size(size), *(f"{column[size]:.1f}" if size in column else "-" for column in columns.values())]
        + ([lines.get(size, "-")] if lines else [])
        for size in sizes
    ]
    return table(["size", *columns, *(["round trip of a cache line, ns"] if lines else [])], rows)


def _lines(rounds: list[dict[str, Any]]) -> dict[int, str]:
    """Return the range of the round-trip times of a cache line between cores, by the size measured at that time."""
    times_ns: dict[int, list[float]] = {}
    for report in rounds:
        for row in report["rows"]:
            times_ns.setdefault(row["nbytes"], []).extend(row.get("line_round_trip_ns", ()))
    return {nbytes: f"{min(times):.0f} to {max(times):.0f}" for nbytes, times in times_ns.items() if times}


def _cores(results: dict[str, Any]) -> int:
    return int(results["machine"]["processor"]["cores"])


def _processor(processor: dict[str, Any]) -> str:
    caches = ", ".join(f"{name} {size}" for name, size in processor["caches"].items())
    vectors = f"{processor['vectors']}, " if processor.get("vectors") else ""
    return f"{processor['model']}, {vectors}{processor['cores']} cores ({caches})"


def _measured_again(results: dict[str, Any]) -> dict[str, list[str]]:
    """Return the kinds that were measured later than the suite, by commit, and by processor if it is another one."""
    machine = results["machine"]
    kinds: dict[str, list[str]] = {}
    for kind in results.keys() - {"machine", "skipped", "failures"}:
        machines = [report.get("machine", machine) for report in results[kind]]
        commits = {f"{other['commit']}{_on_another(other, machine)}" for other in machines}
        for commit in commits - {machine["commit"]}:
            kinds.setdefault(commit, []).append(kind)
    return {commit: sorted(kinds[commit]) for commit in sorted(kinds)}


def _on_another(machine: dict[str, Any], usual: dict[str, Any]) -> str:
    is_usual = machine["processor"]["caches"] == usual["processor"]["caches"]
    return "" if is_usual else f" on another machine ({_processor(machine['processor'])})"


def _about(results: dict[str, Any]) -> str:
    """Describe the machine of the figures."""
    machine = results["machine"]
    processor = machine["processor"]
    versions = software(machine) + sorted({report["library"] for report in results.get("allreduce", [])})
    text = f"{_processor(processor)}, {processor['system']}; {', '.join(versions)}; "
    text += f"commit {machine['commit']}, {machine['date']}.\n"
    for commit, kinds in _measured_again(results).items():
        text += f"\nMeasured again at commit {commit}: {', '.join(kinds)}.\n"
    limits = [report["limits"] for report in results.get("allreduce", [])]
    if limits:
        one, all_cores, line_ns = (
            float(np.median([limit[name] for limit in limits]))
            for name in ("one_core_gb_s", "all_cores_gb_s", "line_round_trip_ns")
        )
        text += (
            f"\nThe machine in the same run: it copies {one:.1f} GB/s on one core and {all_cores:.1f} GB/s on all "
            "ranks' cores at once (256 MB, each byte counted once); a cache line goes from one core to the other and "
            f"back in {line_ns:.0f} ns.\n"
        )
    return text


def render(results: dict[str, Any]) -> str:
    """Return the text of RESULTS.md."""
    parts = [
        "# Results\n",
        "Written by `make bench` (`python benchmarks/bench_suite.py`). What is measured, and why that is the limit, is "
        "in [docs/benchmarks.md](../docs/benchmarks.md). Times are medians in microseconds of the slowest rank; every "
        "ratio is the median over rounds in which the candidates alternate.\n",
        _about(results),
    ]
    for name in ("skipped", "failures"):
        if results.get(name):
            parts.append(f"{name.capitalize()}: " + "; ".join(results[name]) + ".\n")
    on_gpus = results.get("gpu", [])
    targets = [*verdicts(results), *(verdict for report in on_gpus for verdict in gpu_verdicts(report))]
    parts.append("## Targets\n\n" + of_targets(targets))
    rounds, _ = allreduce_rounds(results)
    if rounds:
        parts.append("## Allreduce, sum of float32, fresh data\n\n" + _medians(rounds))
    for kind in sorted(kind for kind in results if kind.startswith("allreduce ") and kind[10:].isdigit()):
        parts.append(f"## Allreduce, {kind[10:]} ranks on {_cores(results)} cores\n\n" + _medians(results[kind]))
    if results.get("updates"):
        parts.append("## Reduce and update, SGD with momentum\n\n" + _medians(update_rounds(results)))
    if results.get("kernels"):
        about = (
            "Sizes are those of one float32 array. GB/s counts every array read and every array written once; the "
            "copy moves as many bytes in the same run. The peer is PyTorch on one thread, for unpacking NumPy's fill; "
            "its time is a multiple of the kernel's.\n\n"
        )
        parts.append("## Kernels on one core\n\n" + about + _kernel_table(results))
    if results.get("convolutions"):
        parts.append(_convolution_table(results))
    if results.get("hybrid"):
        parts.append(_hybrid_table(hybrid_rows(results)))
        steps = [row for report in results["hybrid"] for row in report.get("steps", [])]
        if steps:
            parts.append(_steps_table(steps))
    if results.get("kvstore"):
        about = "In place both overwrite the array that is summed; `dist_sync` keeps the sum, too.\n\n"
        parts.append("## Key-value store\n\n" + about + _medians(results["kvstore"]))
        about = "`dist_async`, one key, against a copy of as many bytes by all ranks at once.\n\n"
        parts.append(about + _medians([{"rows": report["asynchronous"]} for report in results["kvstore"]]))
    parts += [_ingress_table(report) for report in results.get("ingress", [])]
    parts += [_checkpoint_table(report) for report in results.get("checkpoint", [])]
    parts += [_fabric_table(fabric) for report in results.get("fabric", []) for fabric in report["fabrics"]]
    places = overlapped_places(results)
    if places:
        parts.append(_overlap_table(places))
    places = torch_places(results)
    if places:
        parts.append(_torch_table(places))
    parts += [gpu_section(report) for report in on_gpus]
    return _wrapped("\n".join(parts))


def _wrapped(text: str) -> str:
    """Wrap the paragraphs of Markdown to 80 columns; tables and headings stay."""
    paragraphs = text.rstrip("\n").split("\n\n")
    return "\n\n".join(_in_lines(paragraph) for paragraph in paragraphs) + "\n"


def _in_lines(paragraph: str) -> str:
    if paragraph.lstrip().startswith(("|", "#")):
        return paragraph
    lines = textwrap.wrap(paragraph, 80, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)
