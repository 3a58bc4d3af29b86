"""A state with other values on every step and rank, and whether what was restored is that of one step, exactly."""

import types
from pathlib import Path

import numpy as np

from hpcdp.checkpoint import Part, PerRank, Sharded
from hpcdp.checkpoint.hdf5_file import File, FilePiece, Stored
from hpcdp.checkpoint.manager import by_rank
from hpcdp.comm import World

ROWS, COLUMNS = 41, 13
LONG = 300_000  # float32: over `hdf5_file.WHOLE_NBYTES`, so that all ranks write a part


def write_shard(path: Path, pieces: list[FilePiece], compression: str | None = None) -> tuple[list[Stored], File]:
    """A file as the rank in its name writes it."""
    world = types.SimpleNamespace(rank=int(path.stem[-5:]))
    stored, (file,) = by_rank(path.parent, pieces, types.SimpleNamespace(world=world), compression)
    return stored, file


def sharded(values: np.ndarray, world: World) -> Sharded:
    """Of which each rank holds two runs that lie apart."""
    flat, edges = values.reshape(-1), np.linspace(0, values.size, 2 * world.size + 1).astype(int)
    parts = []
    for at in (world.rank, 2 * world.size - 1 - world.rank):
        parts.append(Part(int(edges[at]), flat[edges[at] : edges[at + 1]].copy()))
    return Sharded(values.shape, values.dtype, parts)


def moments(step: int) -> np.ndarray:
    return np.random.default_rng([step, 1]).standard_normal((ROWS, COLUMNS))


def weights(step: int, count: int = LONG) -> np.ndarray:
    return np.random.default_rng([step, 2]).random(count, np.float32)


def own(step: int, rank: int) -> np.ndarray:
    return np.arange(rank + 2) * 1000 + step


def state(step: int, world: World, count: int = LONG) -> dict:
    """What is saved at a step."""
    return {
        "weights": weights(step, count),
        "moments": sharded(moments(step), world),
        "own": PerRank({"values": own(step, world.rank)}),
        "schedule": {"at": step, "rate": 1 / (step + 1), "phases": [1, (2.5, None, "text", True)]},
        "half": np.arange(step % 7, dtype=np.float16).reshape(-1, 1),
    }


def blank(world: World, count: int = LONG) -> dict:
    """What such a state is restored into: of the shapes of a step that 7 divides."""
    filled = state(0, world, count)
    filled["weights"][...] = np.nan
    for part in filled["moments"].parts:
        part.values[...] = np.nan
    filled["own"].value["values"][...] = -1
    return filled


def check(found: dict, step: int, rank: int, saved_on: int, size: int, count: int = LONG) -> None:
    """Whether that is all of a step, exactly; as whole arrays, or restored into `blank`."""
    assert np.array_equal(found["weights"], weights(step, count))
    if isinstance(found["moments"], Sharded):
        for part in found["moments"].parts:
            assert np.array_equal(part.values, moments(step).reshape(-1)[part.first : part.first + part.values.size])
    else:
        assert np.array_equal(found["moments"], moments(step))
    if saved_on == size:
        assert np.array_equal(found["own"]["values"], own(step, rank))
    expected = {"at": step, "rate": 1 / (step + 1), "phases": [1, (2.5, None, "text", True)]}
    assert found["schedule"] == expected
    assert np.array_equal(found["half"], np.arange(step % 7).reshape(-1, 1)) and found["half"].dtype == np.float16
