"""What passes between the ranks that compute layers together: each exchange of a forward has its own in backward.

A tensor is **whole**, and alike on all these ranks, or each has **its channels** of it. All of them must call, alike
and in the same order, and so must their backwards. Losses are of whole tensors: every rank computes the same one, and
the gradient of a whole tensor is whole, and the same bits, on each.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3: `fan_out` is f of figure 3, and `summed` is g.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..arrays import Array, array_namespace
from ..autograd import Gradient, Tensor, on_tape
from ..collectives import allgather, allreduce
from ..comm import World
from ..errors import UnsupportedError
from ..kernels.buffers import empty


def fan_out(x: Tensor, parts: World) -> Tensor:
    """``x``, whole, of which each rank computes something else; backward sums what these add to its gradient."""
    if parts.size == 1:
        return x

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(allreduce(gy, "sum", parts, out=dx.empty()))

    return on_tape(x.data, (x,), pullback)


def summed(x: Tensor, parts: World) -> Tensor:
    """The sum over the ranks, whole; the gradient of each ``x`` is that of the sum."""
    if parts.size == 1:
        return x
    total = empty(x.shape, x.dtype, array_namespace(x.data))

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(gy)

    return on_tape(allreduce(x.data, "sum", parts, out=total), (x,), pullback)


def gathered(x: Tensor, axis: int, ends: Sequence[int], parts: World) -> Tensor:
    """Whole, of which each rank has its channels; in backward each takes those of the gradient.

    Args:
        axis: of the channels.
        ends: where the channels of each rank begin, and the last ones end.
    """
    if parts.size == 1:
        return x
    own = _own(axis % x.ndim, ends, parts)

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(array_namespace(gy).ascontiguousarray(gy[own]))

    return on_tape(_join(x.data, axis, ends, parts), (x,), pullback)


def own_channels(x: Tensor, axis: int, ends: Sequence[int], parts: World) -> Tensor:
    """This rank's channels of ``x``, which is whole; backward gathers those of the gradient. The rest is as `gathered`.

    Raises:
        UnsupportedError: ``x`` has another number of channels.
    """
    if x.ndim < 2 or x.shape[axis] != ends[-1]:
        expected = f"{ends[-1]} channels along axis {axis}, to be split over {parts.size} ranks"
        raise UnsupportedError("own_channels", expected=expected, got=tuple(x.shape))
    if parts.size == 1:
        return x

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(_join(gy, axis, ends, parts))

    own = x.data[_own(axis % x.ndim, ends, parts)]
    return on_tape(array_namespace(own).ascontiguousarray(own), (x,), pullback)


def _own(axis: int, ends: Sequence[int], parts: World) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, slice(ends[parts.rank], ends[parts.rank + 1]))


def _join(own: Array, axis: int, ends: Sequence[int], parts: World) -> Array:
    """All ranks' channels, in their order. Ranks may have different numbers of them, an allgather may not."""
    xp = array_namespace(own)
    counts = [ends[rank + 1] - ends[rank] for rank in range(parts.size)]
    channels = xp.moveaxis(own, axis, 0)
    room = xp.zeros((parts.size, max(counts), *channels.shape[1:]), dtype=own.dtype)
    room[parts.rank, : counts[parts.rank]] = channels
    allgather(room[parts.rank], parts, out=room)
    whole = xp.concatenate([room[rank, :count] for rank, count in enumerate(counts)])
    return xp.ascontiguousarray(xp.moveaxis(whole, 0, axis))
