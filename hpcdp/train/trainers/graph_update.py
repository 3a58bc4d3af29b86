"""The update of a step as the end of a CUDA graph, which has forward and backward, too.

A graph freezes the numbers that a kernel is given, so learning rates, bias corrections and scales lie in the GPU's
memory, and each launch brings those that have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...arrays import Array, is_cupy
from ...gradients.owners import Piece
from ...kernels.cuda.capture import numbers
from .update_scale import clipped_on_gpu, clips_on_gpu

if TYPE_CHECKING:
    from .bucket_trainer import BucketTrainer


def graph_update(trainer: BucketTrainer, leaves: Sequence[Any]) -> GraphUpdate | None:
    """The update of ``trainer``, if a graph can have it: one rank has all sums, of which nobody needs to know anything
    before, they are those of ``leaves``, whose hooks are the trainer's, and each rule is one kernel."""
    reducer = trainer.reducer
    on_gpus = all(is_cupy(each.data) for each in reducer.params.values())
    if not on_gpus or trainer.world.size > 1 or reducer.overlap:
        return None
    update = GraphUpdate(trainer, leaves)
    return update if update.is_possible and update.still_fits() else None


class GraphUpdate:
    """See `graph_update`."""

    def __init__(self, trainer: BucketTrainer, leaves: Sequence[Any]) -> None:
        self._trainer, self._leaves = trainer, leaves
        of_graph = set(map(id, leaves))
        self._not_in_graph = [name for name, param in trainer.reducer.params.items() if id(param) not in of_graph]
        self._captured, self._clip_norm = self._kernels(), trainer.clip_norm
        self._now = (trainer.step_count + 1, 1.0)
        """Step and scale of the next launch."""

    @property
    def is_possible(self) -> bool:
        """Whether each rule is its kernel and no more."""
        return all(piece.rule.update_is_its_kernel for piece, _ in self._captured)

    def capture(self) -> None:
        """Launch it, within a capture."""
        scale = None
        if clips_on_gpu(self._trainer):
            scale = clipped_on_gpu(self._trainer, numbers(lambda: self._now[1:]))
        of_rules: dict[tuple[int, int], Array] = {}
        captured = iter(self._captured)
        owner = self._trainer.owner
        for bucket, pieces in zip(self._trainer.reducer.buckets, owner.pieces, strict=True):
            for piece in pieces:
                key = id(piece.rule), piece.passed_over
                if key not in of_rules:
                    of_rules[key] = numbers(partial(self._coefficients, piece))
                name, coefficients = next(captured)[1], of_rules[key]
                rule = partial(piece.rule.launch, name=name, coefficients=coefficients, scale=scale)
                owner.update_piece(bucket, piece, rule)

    def still_fits(self) -> bool:
        """Whether a launch of what was captured is still the update that is to be made."""
        trainer = self._trainer
        alone = all(map(trainer.reducer.takes, self._leaves))
        clips_alike = trainer.clip_norm == self._clip_norm
        return alone and clips_alike and trainer.updates_at_once and self._kernels() == self._captured

    def step(self, count: int, launch: Callable[[], None]) -> None:
        """What the trainer's ``step(count)`` does, where ``launch`` launches the graph."""

        def update(step: int, scale: float) -> None:
            self._now = step, scale
            launch()

        self._trainer.step_by(update, count)

    def _coefficients(self, piece: Piece) -> tuple[float, ...]:
        step, scale = self._now
        rule, own_step = piece.rule_at(step)
        return rule.kernel(own_step, scale)[1]

    def _kernels(self) -> list[tuple[Piece, str]]:
        self._trainer.leave_out_unused(self._not_in_graph)
        names: dict[int, str] = {}
        found = []
        for pieces in self._trainer.owner.pieces:
            for piece in pieces:
                if id(piece.rule) not in names:
                    names[id(piece.rule)] = piece.rule.kernel(1, 1.0)[0]
                found.append((piece, names[id(piece.rule)]))
        return found
