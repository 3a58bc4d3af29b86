"""Training steps with communication beside them, against the least time that their parts allow.

``hpcdp launch -n 2 -- python -m hpcdp.benchmarks.overlap`` measures the ranks that a launcher started. Without one,
``python -m hpcdp.benchmarks.overlap --hosts 1,2,4`` starts jobs of its own: on this machine, and on as many hosts with
slow links (`cluster`; needs root).

Models are bound by communication or by computation (`steps`). In turn they are trained with gradients that are reduced
when backward is over (``overlap=False``) or beside it (``overlap=True``), and with every rank alone, all of them
computing at the same time but without a word to each other. A turn is some steps in a row, and each counts by the
slowest rank.

Beside the steps stands their critical path (`hpcdp.gradients.critical_path`): forward, backward, when each bucket is
ready and when the next forward needs it are measured in the steps without communication, and the reduction of each
bucket by itself, nothing else going on. Where ranks have no core to spare, updates count as computation, too. A path
takes what is measured alone for granted: processor time that messages and sums take from computation is not on it.
"""

from __future__ import annotations

import argparse
from typing import Any

from hpcdp.comm import World
from hpcdp.errors import ConfigError, check_name
from hpcdp.launch.arguments import Parser, at_least
from hpcdp.launched import launched_ranks

from .harness import program
from .places import add_options, measure_models, measure_places, where
from .steps import MODELS, measure

_JOB_TIMEOUT_S = 400


def table(place: dict[str, Any]) -> str:
    """One place's figures as text, at most 80 columns wide."""
    link = place.get("link_mb_s")
    lines = [f"# {where(place)}, {place['library']}"]
    if link:
        lines.append(f"# link: {link['one_way']:.1f} MB/s one way, {link['both_ways']:.1f} each way at once")
    for each in place["rows"]:
        lines.append(f"# {each['model']}, gradients of {each['mib']:.1f} MiB")
        lines.append(f"{'#':<16}{'step ms':>12}{'/ path':>9}{'exposed ms':>13}{'hidden':>9}{'other threads ms':>20}")
        for name, step_ms in each["step_ms"].items():
            line = f"{name:<16}{step_ms:>12.2f}{each['ratio'][name]:>9.2f}"
            if name in each["hidden"]:
                line += f"{each['exposed_ms'][name]:>13.2f}{100 * each['hidden'][name]:>8.0f}%"
                line += f"{each['beside_ms'][name]:>20.2f}"
            lines.append(line)
        lines.append(f"{'critical path':<16}{each['critical_path_ms']:>12.2f}           {each['critical_path']}"[:80])
        lines.append(
            f"# computation {each['compute_ms']:.2f} ms, reductions one by one {each['reductions_ms']:.2f} ms"
            + ("" if each["same_bits"] else "; WRONG: other bits")
        )
    return "\n".join(lines)


def job(args: argparse.Namespace) -> int:
    """What the ranks of one job do."""

    def row(world: World, name: str) -> dict[str, Any]:
        return measure(world, MODELS[name], args.bucket_cap_mb, args.turns, args.steps)

    place = measure_models("overlap", args, row, table)
    return 0 if all(each["same_bits"] for each in place["rows"]) else 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m hpcdp.benchmarks.overlap", description=__doc__)
    add_options(parser, "1,2,4")
    parser.add_argument("--models", default="wide,deep", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--turns", type=at_least(1), default=5, help="of each candidate (5)")
    parser.add_argument("--steps", type=at_least(1), default=4, help="that are timed in a turn (4)")
    parser.add_argument("--bucket-cap-mb", type=float, metavar="MB", help="as a Trainer takes it")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    for name in args.models.split(","):
        check_name("model", name, list(MODELS))
    if args.bucket_cap_mb is not None and not args.bucket_cap_mb > 0:
        raise ConfigError("overlap", where="--bucket-cap-mb", expected="a positive size", got=args.bucket_cap_mb)
    if launched_ranks() is not None:
        return job(args)
    arguments = ["--models", args.models, "--turns", str(args.turns), "--steps", str(args.steps)]
    arguments += [] if args.bucket_cap_mb is None else ["--bucket-cap-mb", str(args.bucket_cap_mb)]
    places = measure_places("overlap", arguments, args, _JOB_TIMEOUT_S, table)
    if places is None:
        return 2
    return 0 if all(each["same_bits"] for place in places for each in place["rows"]) else 1


if __name__ == "__main__":
    program.run(main)
