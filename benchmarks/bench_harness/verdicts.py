"""Every target, and what became of it, from what the jobs reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdp.bench.measure import format_size

_KB, _MB = 1 << 10, 1 << 20
_OURS = ("hpcdp buckets", "hpcdp any array")
_TRAINER = "Trainer"


@dataclass
class Verdict:
    """One target and what became of it; ``measured`` is None where nothing could be measured."""

    target: str
    what: str
    wanted: str
    measured: str | None
    met: bool


Row = dict[str, Any]
Pick = Callable[[Row], float | None]


def median_by_size(reports: Iterable[dict[str, Any]], pick: Pick) -> dict[int, float]:
    """Return the median over rounds of ``pick(row)`` for every message size, ignoring None."""
    by_size: dict[int, list[float]] = {}
    for report in reports:
        for row in report["rows"]:
            value = pick(row)
            if value is not None:
                by_size.setdefault(row["nbytes"], []).append(value)
    return {nbytes: float(np.median(values)) for nbytes, values in sorted(by_size.items())}


def with_peer(results: dict[str, Any], kind: str, add: Callable[[dict[str, Any]], dict[str, float]]) -> list[Any]:
    """Return the rounds of ``kind``, with ``median_us`` extended by ``add`` of the same round's MPICH row."""
    rounds = []
    for number, report in enumerate(results.get(kind, [])):
        others = results.get(f"{kind} MPICH", [])
        rows = others[number]["rows"] if number < len(others) else []
        extra = {row["nbytes"]: add(row) for row in rows}
        joined = [{**row, "median_us": {**row["median_us"], **extra.get(row["nbytes"], {})}} for row in report["rows"]]
        rounds.append({**report, "rows": joined})
    return rounds


def peer_names(rounds: list[dict[str, Any]], own: Iterable[str]) -> list[str]:
    """Everything in the rounds' tables that is neither ours nor a bare pattern."""
    names: dict[str, None] = {}
    for report in rounds:
        for row in report["rows"]:
            names |= dict.fromkeys(row["median_us"])
    return [name for name in names if name not in own]


def best_peer_ratio(rounds: list[dict[str, Any]], ours: str, peers: list[str]) -> dict[int, tuple[float, str]]:
    """For every size the smallest of the peers' median ratios to ``ours``, over rounds, and whose it is."""
    best: dict[int, tuple[float, str]] = {}
    for peer in peers:
        for nbytes, ratio in median_by_size(rounds, _ratio(peer, ours)).items():
            best[nbytes] = min(best.get(nbytes, (np.inf, "")), (ratio, peer))
    return best


def median(name: str) -> Pick:
    """Return a pick of the median microseconds of ``name``."""
    return lambda row: row["median_us"].get(name)


def _share(name: str) -> Pick:
    return lambda row: row["floor_share"][name]


def _ratio(peer: str, ours: str) -> Pick:
    return lambda row: row["median_us"][peer] / row["median_us"][ours] if peer in row["median_us"] else None


def _worst(target: str, what: str, wanted: float, by_size: dict[int, float], unit: str = "x") -> Verdict:
    """Return the verdict on a target that must hold at every size, by the smallest value."""
    percent = unit == "%"
    shown = f"at least {100 * wanted:.0f}%" if percent else f"at least {wanted:g}{unit}"
    if not by_size:
        return Verdict(target, what, shown, None, False)
    nbytes = min(by_size, key=by_size.__getitem__)
    value = f"{100 * by_size[nbytes]:.0f}%" if percent else f"{by_size[nbytes]:.2f}{unit}"
    held = sum(value >= wanted for value in by_size.values())
    measured = f"{value} at worst ({format_size(nbytes)}); holds at {held} of {len(by_size)} sizes"
    return Verdict(target, what, shown, measured, held == len(by_size))


def _between(values: dict[int, Any], low: int, high: int = 1 << 62) -> dict[int, Any]:
    return {nbytes: value for nbytes, value in values.items() if low <= nbytes <= high}


def verdicts(results: dict[str, Any]) -> list[Verdict]:
    """S1 to S12 from the results of the suite."""
    collectives = [
        *_allreduce(results),
        *_updates(results),
        *_fabrics(results),
        *_overlaps(results),
        *_torch_models(results),
    ]
    return [
        *collectives,
        *_lenet(results),
        *_models(results),
        *_scaling(results),
        *_kernels(results),
        *_convolutions(results),
        *_stores(results),
        *_checkpoints(results),
        *_startup(results),
        *_hybrid(results),
    ]


def allreduce_rounds(results: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rounds of the allreduce comparison including MPICH, and the peers' names."""
    rounds = with_peer(results, "allreduce", lambda row: {"MPICH": row["median"]})
    peers = [name for name in peer_names(rounds, _OURS) if name in ("MPI", "MPI in place", "gloo", "MPICH")]
    return rounds, peers


def _allreduce(results: dict[str, Any]) -> list[Verdict]:
    rounds, peers = allreduce_rounds(results)
    judged = []
    for ours in _OURS:
        share = median_by_size(rounds, _share(ours))
        ratios = {nbytes: ratio[0] for nbytes, ratio in best_peer_ratio(rounds, ours, peers).items()}
        name = f"allreduce, {ours.removeprefix('hpcdp ')}"
        judged.append(_worst("S1", f"{name}: share of the floor above 64 KB", 0.85, _between(share, 64 * _KB + 1), "%"))
        judged.append(_worst("S1", f"{name}: best peer, 1 to 16 MB", 1.3, _between(ratios, _MB, 16 * _MB)))
        judged.append(_worst("S1", f"{name}: best peer, from 64 MB", 4, _between(ratios, 64 * _MB)))
    staged = _between(median_by_size(rounds, lambda row: row["staged_share"]), 64 * _KB + 1)
    what = "allreduce, any array: share of the bare exchange of private arrays above 64 KB"
    judged.append(_worst("S1", what, 0.85, staged, "%"))
    slower = _between(median_by_size(rounds, _microseconds_behind_mpi), 0, 64 * _KB)
    worst = max(slower, key=slower.__getitem__) if slower else 0
    measured = f"{slower[worst]:+.1f} us at worst ({format_size(worst)})" if slower else None
    what = "allreduce, any array: up to 64 KB, behind the MPI library"
    judged.append(Verdict("S1", what, "at most 1 us", measured, bool(slower) and slower[worst] <= 1))
    return judged


def _microseconds_behind_mpi(row: dict[str, Any]) -> float | None:
    mpi = [us for name, us in row["median_us"].items() if name in ("MPI", "MPI in place")]
    return row["median_us"][_OURS[1]] - min(mpi) if mpi else None


def _updates(results: dict[str, Any]) -> list[Verdict]:
    rounds = update_rounds(results)
    ratios = best_peer_ratio(rounds, _TRAINER, peer_names(rounds, (_TRAINER, "owners of shards", "every rank")))
    by_size = {nbytes: ratio[0] for nbytes, ratio in _between(ratios, _MB).items()}
    return [_worst("S1", "reduce and update: best peer's allreduce and update, from 1 MB", 3, by_size)]


def update_rounds(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rounds of reduce and update including MPICH."""
    return with_peer(results, "updates", lambda row: {"MPICH, fused SGD": row["median_us"]["MPI, fused SGD"]})


def _fabrics(results: dict[str, Any]) -> list[Verdict]:
    judged = []
    for fabric in [fabric for report in results.get("fabric", []) for fabric in report["fabrics"]]:
        where = f"allreduce over {fabric['hosts']} hosts x {fabric['ranks_per_node']} ranks, links of {fabric['rate']}"
        share = {row["nbytes"]: row["bound_share"]["auto"] for row in fabric["rows"]}
        judged.append(_worst("S2", f"{where}: share of the link's rate from 4 MB", 0.95, _between(share, 4 * _MB), "%"))
        ratio = {row["nbytes"]: row["mpi_ratio"]["auto"] for row in fabric["rows"]}
        judged.append(_worst("S2", f"{where}: {fabric['library']}'s own, at any size", 1, ratio))
    return judged


def overlapped_places(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the places of all reports of overlap."""
    return [place for report in results.get("overlap", []) for place in report["places"]]


def _overlaps(results: dict[str, Any]) -> list[Verdict]:
    judged = []
    for place in overlapped_places(results):
        for row in place["rows"]:
            what = f"{row['model']}, {where(place)}: a step against its critical path"
            measured = f"{row['ratio'][row['default']]:.3f}x ({row['exposed_ms'][row['default']]:.1f} ms exposed)"
            judged.append(Verdict("S3", what, "at most 1.05x", measured, row["ratio"][row["default"]] <= 1.05))
    return judged


def where(place: dict[str, Any]) -> str:
    """Return the text that names a place: its hosts, ranks and rate."""
    ranks = f"{place['ranks_per_node']} rank" + ("s" if place["ranks_per_node"] > 1 else "")
    return f"{ranks} on one node" if place["hosts"] == 1 else f"{place['hosts']} hosts x {ranks}, {place['rate']}"


_TORCH_OURS = ("hpcdp, every rank", "hpcdp, shards")
_OVER_DDP = {"wide": {16: 1.6, 64: 1.4}}
"""By model and batch: how much faster than DDP it is to be; elsewhere it is not to be slower."""


def torch_places(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the places of all comparisons with PyTorch."""
    return [place for report in results.get("torch", []) for place in report["places"]]


def _torch_models(results: dict[str, Any]) -> list[Verdict]:
    judged = []
    for place in torch_places(results):
        for row in place["rows"]:
            what = f"{row['model']}, batch {row['batch']}, {where(place)}"
            best = max(_TORCH_OURS, key=lambda name: row["share"][name])
            least = _OVER_DDP.get(row["key"], {}).get(row["batch"], 1.0) if place["hosts"] == 1 else 1.0
            times = f"{row['ratio'][_TORCH_OURS[0]]:.2f}x (by shards {row['ratio'][_TORCH_OURS[1]]:.2f}x)"
            met = row["ratio"][_TORCH_OURS[0]] >= least
            judged.append(Verdict("S4", f"{what}: against DDP over gloo", f"at least {least:g}x", times, met))
            if place["hosts"] > 1:  # a slow link has no such rate
                continue
            shares = " by every rank, ".join(f"{row['share'][name]:.0%}" for name in _TORCH_OURS) + " by shards"
            shares += f" (without data, but waiting for the slower rank: {row['unequal']:.0%})"
            met = row["share"][best] >= 0.95
            judged.append(Verdict("S4", f"{what}: of no communication", "at least 95% by either",
                                 shares, met))  # fmt: skip
    return judged


def _lenet(results: dict[str, Any]) -> list[Verdict]:
    judged = []
    for batch in sorted({report["batch"] for report in results.get("lenet", [])}):
        ratios = [row["ratio"] for row in results["lenet"] if row["batch"] == batch and row["ratio"] is not None]
        rates = [row["samples_s"]["hpcdp"] for row in results["lenet"] if row["batch"] == batch]
        what = f"LeNet on one core, batch {batch}, against PyTorch ({np.median(rates):.0f} samples/s here)"
        measured = f"{np.median(ratios):.2f}x" if ratios else None
        judged.append(Verdict("S5", what, "at least 1x", measured, bool(ratios) and np.median(ratios) >= 1))
    return judged


_MODELS = {
    "wide": ("MLP of six layers of 2048", 1.0),
    "char_lstm": ("character LSTM", 1.0),
    "resnet18": ("ResNet-18 on 32 x 32 images", 0.8),
}


def _models(results: dict[str, Any]) -> list[Verdict]:
    judged = []
    every = results.get("models", [])
    for model, (name, least) in _MODELS.items():
        for batch in sorted({report["batch"] for report in every if report["model"] == model}):
            reports = [report for report in every if (report["model"], report["batch"]) == (model, batch)]
            ratios = [report["ratio"] for report in reports if report["ratio"] is not None]
            rate = np.median([report["samples_s"]["hpcdp"] for report in reports])
            what = f"{name} on one core, batch {batch}, against PyTorch ({rate:.0f} samples/s here)"
            measured = f"{np.median(ratios):.2f}x" if ratios else None
            met = bool(ratios) and bool(np.median(ratios) >= least)
            judged.append(Verdict("S5", what, f"at least {least:g}x", measured, met))
    return judged


def efficiency(reports: list[dict[str, Any]], batch: int) -> float | None:
    """Samples/s on 2 ranks over twice those on 1: the median over rounds; None without both."""
    rates = {n: [r["samples_s"] for r in reports if r["batch"] == batch and r["ranks"] == n] for n in (1, 2)}
    pairs = min(len(rates[1]), len(rates[2]))
    if pairs == 0:
        return None
    return float(np.median([two / (2 * one) for one, two in zip(rates[1][:pairs], rates[2][:pairs], strict=True)]))


def _scaling(results: dict[str, Any]) -> list[Verdict]:
    judged = []
    reports = results.get("scaling", [])
    for batch in sorted({report["batch"] for report in reports}):
        ours, ddp = efficiency(reports, batch), efficiency(results.get("scaling DDP", []), batch)
        what = f"LeNet, 1 to 2 ranks, batch {batch} a rank" + (f" (DDP over gloo: {ddp:.2f})" if ddp else "")
        unequal = [r["unequal"] for r in reports if r["batch"] == batch and r["unequal"] is not None]
        limit = f" (steps that wait for the longer one: {np.median(unequal):.2f})" if unequal else ""
        measured = None if ours is None else f"{ours:.2f}{limit}"
        judged.append(Verdict("S6", what, "at least 0.95", measured, ours is not None and ours >= 0.95))
    return judged


def kernel_names(results: dict[str, Any]) -> list[str]:
    """Return the measured kernels in the benchmark's order."""
    return list(dict.fromkeys(row["kernel"] for report in results.get("kernels", []) for row in report["rows"]))


def of_kernel(name: str, key: str) -> Pick:
    """Return a pick of ``key`` in the row of the kernel ``name``."""
    return lambda row: row[key] if row["kernel"] == name else None


def _kernels(results: dict[str, Any]) -> list[Verdict]:
    rounds = results.get("kernels", [])
    judged = []
    for name in kernel_names(results):
        share = median_by_size(rounds, of_kernel(name, "share"))
        judged.append(_worst("S7", f"kernel, {name}: share of the copy rate", 0.85, share, "%"))
    return judged or [_worst("S7", "kernels: share of the copy rate", 0.85, {}, "%")]


def _convolutions(results: dict[str, Any]) -> list[Verdict]:
    judged = []
    for layer, rows in convolution_rows(results).items():
        if rows[0]["channels"] >= 64:
            key, wanted, least = "share", "at least 85%", 0.85
            what = "the time of a bare product over its own"
        else:
            key, wanted, least = "peer_ratio", "at least 1x", 1.0
            what = "PyTorch's time over its own"
        ratios = [row[key] for row in rows]
        is_known = None not in ratios
        texts = [f"{100 * ratio:.0f}%" if key == "share" else f"{ratio:.2f}x" for ratio in ratios if ratio is not None]
        measured = f"{', '.join(texts)} ({', '.join(row['pass'] for row in rows)})" if is_known else None
        what_of = f"convolution {layer}: {what}"
        judged.append(Verdict("S8", what_of, wanted, measured, is_known and min(ratios) >= least))
    return judged


def convolution_rows(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the passes of each layer by its name."""
    passes: dict[str, list[dict[str, Any]]] = {}
    for row in (row for report in results.get("convolutions", []) for row in report["rows"]):
        passes.setdefault(row["layer"], []).append(row)
    return passes


def _stores(results: dict[str, Any]) -> list[Verdict]:
    judged = []
    for how in ("in place", "to another array"):
        ratio = median_by_size(results.get("kvstore", []), lambda row, how=how: row["ratio"][how])  # type: ignore[misc]
        judged.append(_worst("S10", f"dist_sync, pushpull {how}: the time of an allreduce over its own", 0.9, ratio))
    kept = median_by_size(results.get("kvstore", []), lambda row: row["ratio"].get("allreduce, sum kept"))
    what = "dist_sync, pushpull in place: the time of an allreduce that keeps the sum, too, over its own"
    judged.append(_worst("S10", what, 0.9, kept))
    asynchronous = [{"rows": report["asynchronous"]} for report in results.get("kvstore", [])]
    share = median_by_size(asynchronous, lambda row: row["copy_share"]["push, then pull"])
    what = "dist_async, push and pull of 1 MB keys in a node: share of the copy rate"
    judged.append(_worst("S10", what, 0.25, _between(share, _MB, _MB), "%"))
    for report in results.get("ingress", []):
        what = f"dist_async, push and pull of 1 MB keys over 2 hosts, {report['rate']}: share of the link's rate"
        judged.append(_worst("S10", what, 0.9, {_MB: report["link"]["share"]["push all, then pull all"]}, "%"))
    return judged


def _checkpoints(results: dict[str, Any]) -> list[Verdict]:
    judged = []
    for report in results.get("checkpoint", []):
        what = f"checkpoint of {format_size(report['nbytes'])} by {report['ranks']} ranks"
        for how in ("save", "load", "load, not cached"):
            ratios = report["ratio"][how]
            others = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items() if name not in ("raw", "hpcdp"))
            measured = f"{ratios['hpcdp']:.2f}" + (f" ({others})" if others else "")
            what_of = f"{what}, {how}: the time of raw files over its own"
            judged.append(Verdict("S9", what_of, "at least 0.9", measured, ratios["hpcdp"] >= 0.9))
        of_state, of_part = report["stop_ratio"].values()
        what_of = f"{what}, asynchronous: training stops, in memory copies of the state (of what this rank writes)"
        judged.append(Verdict("S9", what_of, "at most 1", f"{of_state:.2f} ({of_part:.2f})", of_state <= 1))
    return judged


def _startup(results: dict[str, Any]) -> list[Verdict]:
    judged = []
    for report in results.get("startup", [])[:1]:
        for key, what, limit in (
            ("import_s", "import hpcdp", 0.2),
            ("launch_s", f"hpcdp launch -n {report['ranks']} until the world is known", 0.5),
        ):
            judged.append(Verdict("S11", what, f"at most {limit} s", f"{report[key]:.3f} s", report[key] <= limit))
    return judged


def _hybrid(results: dict[str, Any]) -> list[Verdict]:
    judged = []
    for row in (row for row in hybrid_rows(results) if row["batch"] == 1):
        what = f"{row['network']}, batch 1" + ", with backward" * row["backward"]
        if "products" in row["ratio"]:
            over, bound = (1 / row["ratio"][name] for name in ("products", "products, bound"))
            measured = (
                f"{over:.2f}x ({bound:.2f}x of bound methods; without a plan {row['ratio']['eager'] * over:.1f}x)"
            )
            what_of = f"{what}: a replay over the bare products"
            judged.append(Verdict("S12", what_of, "at most 1.3x", measured, over <= 1.3))
        if row["eager_over_torch"] is not None:
            ratio = 1 / row["eager_over_torch"]
            what_of = f"{what}, without a plan, against PyTorch"
            judged.append(Verdict("S12", what_of, "at least 1x", f"{ratio:.2f}x", ratio >= 1))
    return judged


def hybrid_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of all reports of hybridized networks."""
    return [row for report in results.get("hybrid", []) for row in report["rows"]]
