"""Calls of a trainer on the GPU that its parameters are on, whatever GPU is current where it is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from ...arrays import on_device_of

if TYPE_CHECKING:
    from .bucket_trainer import BucketTrainer

P = ParamSpec("P")
T = TypeVar("T")


def on_its_gpu(method: Callable[Concatenate[BucketTrainer, P], T]) -> Callable[Concatenate[BucketTrainer, P], T]:
    """``method`` with the GPU of the parameters, if they are on one, for this thread's current one."""

    @wraps(method)
    def call(self: BucketTrainer, *args: P.args, **kwargs: P.kwargs) -> T:
        with on_device_of(next((bucket.mine for bucket in self.reducer.buckets), None)):
            return method(self, *args, **kwargs)

    return call
