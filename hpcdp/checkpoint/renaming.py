"""Other names for what a form has, before it is restored: parts of a state that are called otherwise now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .names import unquoted
from .refused import TOLD, raised
from .tree import Form, quoted


def new_names(form: Form, rename: Mapping[str, str] | Callable[[str], str] | None) -> dict[str, str]:
    """The names of a form that are to be others, by what they are.

    Args:
        rename: a function of a name, or new names by old ones, which stand for all that begins with them, too, and has
            no longer one among them.

    Raises:
        ConfigError: ``rename`` is neither, an old name is none of the form's, or a new one is no text.
    """
    if rename is None:
        return {}
    names = ["/".join(map(quoted, path)) for path, _ in _paths(form, ())]
    if callable(rename):
        try:
            given = {name: rename(name) for name in names}
        except TOLD as error:
            raise raised("restore", "rename", "a function of a name", error) from error
    elif not isinstance(rename, Mapping):
        raise ConfigError("restore", where="rename", expected="a dict of names, or a function", got=repr(rename))
    else:
        for old in rename:
            if not isinstance(old, str) or not any(f"{name}/".startswith(f"{old}/") for name in names):
                expected = "names of the checkpoint outside of lists, or what stands before a slash in them"
                raise ConfigError("restore", where="rename", expected=expected, got=repr(old))
        given = {name: _moved(name, rename) for name in names}
    odd = next((name for name, new in given.items() if not isinstance(new, str) or not new), None)
    if odd is not None:
        raise ConfigError("restore", where="rename", expected=f"a name for {odd!r}", got=repr(given[odd]))
    return {name: new for name, new in given.items() if new != name}


def renamed(form: Form, names: Mapping[str, str]) -> Form:
    """A form whose names are others, as `new_names` says.

    Raises:
        ConfigError: two would have one name.
    """
    if not names:
        return form
    root: dict[Any, Any] = {}
    for path, node in _paths(form, ()):
        now = names.get("/".join(map(quoted, path)))
        keys: tuple[Any, ...] = path if now is None else tuple(map(unquoted, now.split("/")))
        place = root
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise ConfigError("restore", where="rename", expected="names that do not meet",
                                  got=repr("/".join(map(str, keys))))  # fmt: skip
        if keys[-1] in place:
            raise ConfigError(
                "restore", where="rename", expected="names that do not meet", got=f"{'/'.join(map(str, keys))!r} twice"
            )
        place[keys[-1]] = _Leaf(node)
    return _form_of(root)


@dataclass
class _Leaf:
    node: Form


def _paths(form: Form, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Form]]:
    if isinstance(form, dict) and "dict" in form and form["dict"]:
        for key, node in form["dict"]:
            yield from _paths(node, (*path, key))
    else:
        yield path, form


def _moved(name: str, rename: Mapping[str, str]) -> str:
    fitting = [old for old in rename if name == old or name.startswith(f"{old}/")]
    if not fitting:
        return name
    old = max(fitting, key=len)
    return f"{rename[old]}{name[len(old) :]}" if isinstance(rename[old], str) else rename[old]


def _form_of(value: Any) -> Form:
    if isinstance(value, _Leaf):
        return value.node
    return {"dict": [[key, _form_of(each)] for key, each in value.items()]}
