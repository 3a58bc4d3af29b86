"""The optimizer's state of a trainer on a store as a file: that of the store, whoever updates.

See `kvstore.states`; keys are the numbers of the parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..arrays import from_host, to_host
from ..comm.agreement import on_every_rank, on_rank_0
from ..kvstore.arguments import Key
from ..kvstore.states import States, read_states, write_states

if TYPE_CHECKING:
    from .store_trainer import StoreTrainer


def save(trainer: StoreTrainer, path: Path) -> None:
    """See `Trainer.save_states`."""
    if trainer.update_on_kvstore:
        trainer.store.save_optimizer_states(str(path))
        return
    steps: dict[Key, int] = {}
    states: States = {}
    if trainer.step_count:
        for (key, param), state in zip(trainer.params.items(), trainer.states, strict=True):
            steps[key] = trainer.step_count
            states |= {(key, name): to_host(array).reshape(param.data.shape) for name, array in state.items()}

    def write() -> None:
        write_states(path, trainer.optimizer, steps, states)

    write() if trainer.world is None else on_rank_0(trainer.world.comm, write)


def load(trainer: StoreTrainer, path: Path) -> None:
    """See `Trainer.load_states`."""
    shapes: dict[Key, tuple[int, ...]] = {key: tuple(param.data.shape) for key, param in trainer.params.items()}

    def read() -> tuple[dict[Key, int], States]:
        return read_states(path, trainer.optimizer, shapes)

    steps, states = read() if trainer.world is None else on_every_rank(trainer.world.comm, read)
    if trainer.update_on_kvstore:
        trainer.store.load_optimizer_states(str(path))
    else:
        for key, state in enumerate(trainer.states):
            for name, place in state.items():
                place[...] = from_host(states[key, name].reshape(-1), place) if key in steps else 0
    trainer.step_count = max(steps.values(), default=0)
