"""Methods that are called later, of objects that may be gone by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakMethod

T = TypeVar("T")


def weakly(method: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that calls a bound method as long as its object lives, and then returns False."""
    weak = WeakMethod(method)

    def call() -> bool:
        living = weak()
        return living is not None and living()

    return call


class WeakMethods(list[WeakMethod[Callable[[], T]]]):
    """Bound methods without arguments, which keep no object alive."""

    def add(self, method: Callable[[], T]) -> None:
        """One more, in the place of all whose objects are gone."""
        self[:] = [each for each in self if each() is not None]
        self.append(WeakMethod(method))

    def living(self) -> list[Callable[[], T]]:
        """Those whose objects live, in the order in which they came."""
        return [method for method in (each() for each in self) if method is not None]
