"""The order of an optimizer's parameters: torch's state dicts number them, and names say which is which.

An optimizer numbers its parameters by the order in which it was given them, so that states that are loaded by number go
to others where layers are registered in another order since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import ConfigError, listed

_OF_WRAPPERS = ("module.", "_orig_mod.")
"""What wrappers, such as `DistributedDataParallel` and torch.compile, put before the names of a module."""


class Order(NamedTuple):
    """A saved order in terms of the one here."""

    numbers: dict[int, int]
    """The number of each parameter here, by its saved one."""
    groups: list[int]
    """For each group here, the number of the saved one."""


def plain(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the names without the prefixes of wrappers, unless two would be the same then."""
    stripped = [[_stripped(name) for name in names] for names in groups]
    count = sum(map(len, groups))
    return stripped if len({name for names in stripped for name in names}) == count else [[*names] for names in groups]


def _stripped(name: str) -> str:
    while name.startswith(_OF_WRAPPERS):
        name = name.partition(".")[2]
    return name


def match(operation: str, numbers: Sequence[Sequence[int]], saved: Sequence[Sequence[str]],
          own: Sequence[Sequence[str]]) -> Order:  # fmt: skip
    """Match saved parameters and their groups with those here, by their names.

    Args:
        operation: for errors.
        numbers: of the saved parameters, by group.
        saved: their names, by group.
        own: the names of the parameters here, by group; they are numbered in this order.

    Raises:
        ConfigError: names, or the members of a group, differ.
    """
    saved, own = plain(saved), plain(own)
    theirs, ours = ({name for names in groups for name in names} for groups in (saved, own))
    if theirs != ours:
        missing, odd = sorted(ours - theirs), sorted(theirs - ours)
        raise ConfigError(
            operation, where="param_names", expected=f"states of {listed(missing)}" if missing else "no other states",
            got=f"states of {listed(odd)}" if odd else "none", remedy="make the optimizer with the same parameters",
        )  # fmt: skip
    left = list(range(len(saved)))
    groups = []
    for number, names in enumerate(own):
        same = next((each for each in left if set(saved[each]) == set(names)), None)
        if same is None:
            raise ConfigError(
                operation, where=f"group {number}", expected=f"a group of {listed(names)}", got="other groups",
                remedy="make the optimizer with groups of the same parameters",
            )  # fmt: skip
        left.remove(same)
        groups.append(same)
    if left:
        raise ConfigError(operation, where="param_groups", expected=f"{len(own)} groups", got=len(saved))
    places = {name: place for place, name in enumerate(name for names in own for name in names)}
    pairs = (
        (old, name) for olds, names in zip(numbers, saved, strict=True) for old, name in zip(olds, names, strict=True)
    )
    return Order({old: places[name] for old, name in pairs}, groups)


def ordered(operation: str, state_dict: dict[str, Any], own: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a state dict of torch's whose parameters are in the order of ``own``, by its ``param_names``.

    One without names is returned as it is. ``param_names`` are left out of the result.

    Raises:
        ConfigError: as `match`.
    """
    groups = state_dict["param_groups"]
    if not all("param_names" in group for group in groups):
        return state_dict
    order = match(operation, [group["params"] for group in groups], [group["param_names"] for group in groups], own)
    state = {order.numbers.get(number, number): each for number, each in state_dict["state"].items()}
    made, first = [], 0
    for number, names in zip(order.groups, own, strict=True):
        kept = {name: value for name, value in groups[number].items() if name != "param_names"}
        made.append({**kept, "params": list(range(first, first + len(names)))})
        first += len(names)
    return {**state_dict, "state": state, "param_groups": made}
