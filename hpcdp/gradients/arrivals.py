"""Which gradients of a step backward has written, and whether it adds to what they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import StaleGradientError
from .beside import Beside
from .bucket import Bucket, Parameter, State

_TAKING = (State.FILLING, State.READY)


class Arrivals:
    """The gradients that backward writes into buckets.

    Args:
        params: all of them by name, in the model's order.
        buckets: where their gradients are.
        beside: what may still read a bucket of the step before; None without overlap.
    """

    def __init__(self, params: Mapping[str, Parameter], buckets: Sequence[Bucket], beside: Beside | None) -> None:
        self._params, self._buckets, self._beside = params, buckets, beside
        self._bucket_of = {slot.name: bucket for bucket in buckets for slot in bucket.slots}
        self.num_missing = len(params)
        """Gradients that backward has still to write in this step."""
        self._overwriting: set[str] | None = None
        """While gradients accumulate: the parameters whose gradients backward otherwise overwrites."""
        self._written_before: set[str] = set()
        """Parameters whose gradients earlier virtual shards of this step have."""
        self.are_held = False
        """Whether another backward of the step follows, so that this one launches nothing."""

    def begin(self) -> None:
        """Begin a step: every gradient is to be written anew."""
        self._written_before.clear()
        self._await_all()

    def begin_again(self) -> None:
        """Begin the next virtual shard of the step: every gradient is to be written anew."""
        self._written_before.update(name for name in self._params if not self.is_missing(name))
        self._await_all()

    def _await_all(self) -> None:
        for bucket in self._buckets:
            bucket.missing = bucket.awaited = set(bucket.names)
            bucket.state = State.FILLING
        self.num_missing = len(self._params)

    def note(self, name: str) -> Bucket:
        """The gradient of parameter ``name`` is written. Returns its bucket, which is READY if that was its last.

        Raises:
            StaleGradientError: the bucket is on its way to other ranks, or summed.
        """
        bucket = self._bucket_of[name]
        if bucket.state not in _TAKING:
            beside = ", or make the Trainer with overlap=False" if self._beside is not None else ""
            raise StaleGradientError(
                "backward", where=name, expected="one backward before each step()", got="another one",
                remedy=f"call step() in between, or all but the last within no_sync(){beside}; after a backward that "
                "failed, step(0) on all ranks drops what it wrote",
            )  # fmt: skip
        if name in bucket.missing:
            bucket.missing.remove(name)
            self.num_missing -= 1
        bucket.awaited.discard(name)
        bucket.state = State.FILLING if bucket.awaited else State.READY
        return bucket

    @property
    def missing(self) -> list[str]:
        """Parameters that backward has not written since the last step, in the model's order."""
        if not self.num_missing:
            return []
        return [name for name in self._params if name in self._bucket_of[name].missing]

    @property
    def unused(self) -> list[str]:
        """Parameters that no backward of the step has written, in any virtual shard, in the model's order."""
        return [name for name in self.missing if name not in self._written_before]

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was written or launched since the step began."""
        return self.num_missing == len(self._params) and all(each.state is State.FILLING for each in self._buckets)

    def is_missing(self, name: str) -> bool:
        """Whether backward has still to write the gradient of parameter ``name`` in this step."""
        return name in self._bucket_of[name].missing

    def takes(self, name: str) -> bool:
        """Whether the gradient of parameter ``name`` may still be written in this step."""
        return self._bucket_of[name].state in _TAKING

    def fill_with_zeros(self) -> None:
        """Make gradients that backward has not written zero, so that they add nothing."""
        if not self.num_missing:
            return
        for bucket in self._buckets:
            if bucket.missing and self._beside is not None:
                self._beside.settle(bucket)
            for slot in bucket.slots:
                if slot.name in bucket.missing:
                    bucket.view(slot)[...] = 0
            if bucket.state is State.FILLING:
                bucket.state = State.READY

    def accumulate(self) -> None:
        """From now on backward adds to the gradients, and launches nothing until `launch_again`.

        What it has not written in this step counts as zero; parameters with ``grad_req="null"`` stay without.
        """
        self.are_held = True
        if self._overwriting is None:
            self._overwriting = set()
            self.fill_with_zeros()
        for name, param in self._params.items():
            if param.grad_req == "write":
                self._overwriting.add(name)
                param.grad_req = "add"

    def launch_again(self) -> None:
        """The next backward is the last one of this step, and may launch reductions."""
        self.are_held = False
        for bucket in self._buckets:
            bucket.awaited = set(bucket.names)

    @property
    def accumulating(self) -> bool:
        """Whether backward adds to the gradients."""
        return self._overwriting is not None

    def overwrite(self) -> None:
        """Undo `accumulate`, but where the program has set another ``grad_req`` since."""
        if self._overwriting is not None:
            for name in self._overwriting:
                if self._params[name].grad_req == "add":
                    self._params[name].grad_req = "write"
            self._overwriting = None
