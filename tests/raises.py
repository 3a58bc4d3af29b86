"""`raises`, by which tests check the fields of an error instead of its words.

The words of messages are kept in `error_messages.txt` alone, so that they can be improved without changing other tests.
"""

import contextlib
import re
from collections.abc import Iterator

import pytest

_EQUAL = ("operation", "where", "rank")
_CONTAIN = ("expected", "got", "remedy")


@contextlib.contextmanager
def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], **fields: object
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Check that the context raises an `HpcdpError` of this kind with these fields.

    Args:
        kind: the class of the error, or one that it derives from.
        fields: fields of `HpcdpError`. ``operation``, ``where`` and ``rank`` equal the error's, as text. ``expected``,
            ``got`` and ``remedy`` are data that the error's contains: a number, shape, dtype, name or call, as it is
            written there, or a list of several. What is not passed is not checked.
    """
    __tracebackhide__ = True
    unknown = fields.keys() - {*_EQUAL, *_CONTAIN}
    if unknown:
        raise TypeError(f"an HpcdpError has no field {', '.join(sorted(unknown))}")
    with pytest.raises(kind) as caught:
        yield caught
    different = [f"{name} {wanted!r}" for name, wanted in fields.items() if not _agrees(caught.value, name, wanted)]
    if different:
        found = {name: getattr(caught.value, name, None) for name in (*_EQUAL, *_CONTAIN)}
        pytest.fail(f"{type(caught.value).__name__}: wanted {', '.join(different)}, and it has {found}")


def _agrees(error: BaseException, name: str, wanted: object) -> bool:
    found = getattr(error, name, None)
    if name in _EQUAL:
        return (found is None) == (wanted is None) and str(found) == str(wanted)
    text = "" if found is None else str(found)
    return all(_contains(text, str(datum)) for datum in (wanted if isinstance(wanted, list) else [wanted]))


def _contains(text: str, datum: str) -> bool:
    """Return whether a text contains a datum that is no part of a longer number or name."""
    before = r"(?<![\w.-])" if datum[:1].isdigit() else r"(?<!\w)" if datum[:1].isalpha() else ""
    after = r"(?!\w|\.\d)" if datum[-1:].isdigit() else r"(?!\w)" if datum[-1:].isalpha() else ""
    return re.search(before + re.escape(datum) + after, text) is not None
