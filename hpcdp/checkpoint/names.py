"""Names of what is in a state, as those write them who ask for it."""

from __future__ import annotations

import difflib
import itertools
import urllib.parse

from . import tree


def unquoted(name: str) -> str:
    """A name with the keys that programs know; only slashes say where one ends."""
    return "/".join("" if key == "%" else urllib.parse.unquote(key) for key in name.split("/"))


def remedy(form: tree.Form, name: str) -> str | None:
    """What to say of a name that a state does not have: which is meant, the same but for quoted keys, or alike."""
    keys = (each.split("/") for each, _ in tree.entries(form))
    known = {"/".join(prefix) for each in keys for prefix in itertools.accumulate([key] for key in each)}
    close = [each for each in known if unquoted(each) == name] or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else None
