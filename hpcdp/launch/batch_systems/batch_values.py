"""What batch systems take as values of their options, so that a dry run finds what a submission would have refused.

Names of queues, partitions and resources are a site's own: only what can be none at all is found here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...errors import ConfigError

Valid = Mapping[str, tuple[str, str]]
"""Of options by name: what a value must be, and how that is said."""

COUNT = "[1-9][0-9]{0,8}", "a whole number from 1"
NAME = r"(?!-)[\w.+@:*-]+(,[\w.+@:*-]+)*", "a name of letters, digits and _.+@:*-"

_SLURM_TIME = (
    "(?=.*[1-9])[0-9]+(-[0-9]+(:[0-5]?[0-9]){0,2}|(:[0-5]?[0-9]){1,2})?|0|(?i:UNLIMITED|INFINITE)",
    "a time as Slurm writes it, e.g. 04:00:00 or 2-12, minutes and seconds below 60, or 0 for no limit",
)
_SLURM_GPUS = r"(\w[\w.-]*:)?[0-9]+"
_SLURM_GRES = r"(gres[:/])?\w+([:=][\w.-]+){0,2}"
_SLURM_MEMORY = "[0-9]+(?i:[KMGT]?B?)", "a number of MiB, or with K, M, G or T behind it, e.g. 16G"
SLURM: Valid = {
    "time": _SLURM_TIME,
    "mem": _SLURM_MEMORY,
    "mem-per-cpu": _SLURM_MEMORY,
    "mem-per-gpu": _SLURM_MEMORY,
    "cpus-per-task": COUNT,
    "time-min": _SLURM_TIME,
    "gres": (f"{_SLURM_GRES}(,{_SLURM_GRES})*", "a name, its type and its number, e.g. gpu:4 or gpu:a100:2"),
    "gpus-per-node": (f"{_SLURM_GPUS}(,{_SLURM_GPUS})*", "a number, or a type and a number, e.g. a100:2"),
    "partition": NAME,
    "qos": NAME,
}
"""Options of srun and sbatch by their long names."""

SLURM_SHORT = {"t": "time", "p": "partition", "c": "cpus-per-task", "q": "qos"}

_SGE_TIME = "(?=.)[0-9]*(:[0-9]*){0,2}|INFINITY", "seconds, or H:M:S, e.g. 4:00:00"
_SGE_MEMORY = r"[0-9]+(\.[0-9]+)?[kKmMgG]?|INFINITY", "a number of bytes, or with K, M or G behind it, e.g. 16G"
_SGE_NAME = r"[^\d\s/:@\\*?][^\s/:@\\*?]*", "a name that begins with no digit, and has no blanks and no / : @ \\ * ?"
SGE_RESOURCES: Valid = {
    **dict.fromkeys(("h_rt", "s_rt", "h_cpu", "s_cpu"), _SGE_TIME),
    **dict.fromkeys(
        ("h_vmem", "s_vmem", "h_rss", "s_rss", "h_data", "s_data", "h_stack", "s_stack", "h_fsize", "s_fsize",
         "mem_free", "virtual_free", "mem_total"), _SGE_MEMORY,
    ),
}  # fmt: skip
"""What ``-l`` of qsub asks for, of those that every Grid Engine has."""

SGE: Valid = {"q": NAME, "P": NAME, "pe": NAME, "p": ("-?[0-9]{1,4}", "a number from -1023 to 1024"), "N": _SGE_NAME}

YARN: Valid = {
    **dict.fromkeys(("container_memory", "container_vcores", "master_memory", "master_vcores"), COUNT),
    **dict.fromkeys(("timeout", "priority"), ("[0-9]{1,10}", "a whole number")),
    "container_resources": (r"[\w./-]+=[0-9]+\w*(,[\w./-]+=[0-9]+\w*)*", "e.g. memory-mb=4096,vcores=2"),
    "queue": NAME,
}
"""Options of the client of YARN's distributed shell."""


def check(option: str, given: Iterable[tuple[str, str]], valid: Valid) -> None:
    """`ConfigError` for the first of ``given``, names and values within ``option``, whose value cannot be."""
    for name, value in given:
        pattern, expected = valid.get(name, (".*", ""))
        if not re.fullmatch(pattern, value, re.ASCII | re.DOTALL):
            raise ConfigError(option, expected=f"for {name} {expected}", got=repr(value))


def of_words(words: Sequence[str], short: Mapping[str, str] = {}) -> Iterator[tuple[str, str]]:
    """The options among words and what they are given, as ``-x V``, ``--long V`` or ``--long=V``; those of ``short``
    also as ``-xV``, by their long names."""
    for word, after in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and len(name) > 1 and word[1] in short and not word.startswith("--"):
            yield short[word[1]], word[2:]
        elif word.startswith("-") and name:
            yield short.get(name, name), value if equals else after
