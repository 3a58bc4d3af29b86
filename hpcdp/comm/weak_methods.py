"""Methods that are called later, of objects that may be gone by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakMethod

T = TypeVar("T")


class WeakMethods(list[WeakMethod[Callable[[], T]]]):
    """Bound methods without arguments, which keep no object alive."""

    def add(self, method: Callable[[], T]) -> None:
        """One more, in the place of all whose objects are gone."""
        self[:] = [each for each in self if each() is not None]
        self.append(WeakMethod(method))

    def living(self) -> list[Callable[[], T]]:
        """Those whose objects live, in the order in which they came."""
        return [method for method in (each() for each in self) if method is not None]
