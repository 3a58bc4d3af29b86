"""The messages of the 60 mistakes that users make most often, kept in `error_messages.txt` to be read as a whole.

After a change of a text, ``python tests/test_error_messages.py`` writes the file anew; read what it changed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import hpcdp
from hpcdp import autograd, checkpoint, data, kvstore, nn, optim
from hpcdp.cli import main
from hpcdp.comm import World, thread_comm
from hpcdp.train.config import TrainConfig

MESSAGES = Path(__file__).with_name("error_messages.txt")
ONES = np.ones(4, np.float32)
IMAGES = np.ones((2, 1, 8, 8), np.float32)


def network() -> nn.Module:
    net = nn.Sequential(nn.Dense(4, 3), nn.Dense(3, 2))
    return net


def trained(steps: int = 1, count: int = 1, backward: bool = True, **settings: object) -> None:
    net = network()
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world=thread_comm.alone(), **settings)
    for _ in range(steps):
        if backward:
            with autograd.record():
                loss = (net(ONES[None]) ** 2).sum(axis=1)
            loss.backward()
        trainer.step(count)


def twice_backward() -> None:
    w = autograd.as_tensor(ONES)
    w.attach_grad()
    with autograd.record():
        loss = (w * w).sum()
    loss.backward()
    loss.backward()


def store() -> kvstore.KVStore:
    values = kvstore.create("local")
    values.init("w", ONES)
    return values


def on_two_ranks(call: Callable[[World], object]) -> Callable[[Path], object]:
    return lambda folder: thread_comm.run(2, call)


def by_rank(*values: object) -> Callable[[World], object]:
    return lambda world: values[world.rank]


def saved(folder: Path, **settings: object) -> checkpoint.Manager:
    manager = checkpoint.Manager(folder, world=thread_comm.alone(), **settings)
    manager.save(1, {"w": ONES})
    manager.wait()
    return manager


MISTAKES: dict[str, Callable[[Path], object]] = {
    # arrays and collectives
    "allreduce of a list": lambda folder: hpcdp.allreduce([1.0, 2.0], world=thread_comm.alone()),
    "allreduce of text": lambda folder: hpcdp.allreduce(np.array(["a"]), world=thread_comm.alone()),
    "allreduce by an unknown operation": lambda folder: hpcdp.allreduce(ONES, op="summ", world=thread_comm.alone()),
    "allreduce by an unknown algorithm": lambda folder: hpcdp.allreduce(
        ONES, algorithm="rings", world=thread_comm.alone()
    ),
    "broadcast from a rank that is not there": lambda folder: hpcdp.broadcast(ONES, root=7, world=thread_comm.alone()),
    "reduce into an array that is too short": lambda folder: hpcdp.allreduce(
        ONES, out=np.ones(3, np.float32), world=thread_comm.alone()
    ),
    "allreduce of other shapes": on_two_ranks(
        lambda world: hpcdp.allreduce(np.ones(by_rank(3, 4)(world)), world=world)
    ),
    "allreduce of other dtypes": on_two_ranks(
        lambda world: hpcdp.allreduce(np.ones(3, by_rank("float32", "float64")(world)), world=world)
    ),
    "allreduce by other operations": on_two_ranks(
        lambda world: hpcdp.allreduce(np.ones(3), op=by_rank("sum", "max")(world), world=world)
    ),
    "broadcast beside allreduce": on_two_ranks(
        lambda world: by_rank(hpcdp.broadcast, hpcdp.allreduce)(world)(np.ones(3), world=world)
    ),
    "use of a closed world": lambda folder: hpcdp.allreduce(ONES, world=closed_world()),
    "a GPU that is not there": lambda folder: network().to(hpcdp.gpu(99)),
    # automatic differentiation
    "backward twice": lambda folder: twice_backward(),
    "backward without record": lambda folder: autograd.as_tensor(ONES).backward(),
    "shapes that do not fit": lambda folder: autograd.as_tensor(ONES) + np.ones(3),
    # networks
    "a layer of no units": lambda folder: nn.Dense(4, 0),
    "a layer of half a unit": lambda folder: nn.Dense(4, 2.5),
    "an input of another width": lambda folder: network()(np.ones((1, 5), np.float32)),
    "an image of other channels": lambda folder: nn.Conv2D(3, 4, 3)(IMAGES),
    "a dropout rate of 2": lambda folder: nn.Dropout(2),
    "a label that is no class": lambda folder: nn.functional.softmax_cross_entropy(
        np.ones((2, 3), np.float32), np.array([0, 3])
    ),
    "labels of another length": lambda folder: nn.functional.softmax_cross_entropy(
        np.ones((2, 3), np.float32), np.array([0])
    ),
    "a state without a parameter": lambda folder: network().load_state_dict({}),
    "a state of other shapes": lambda folder: network().load_state_dict(
        {name: np.ones(7, np.float32) for name in network().state_dict()}
    ),
    # optimizers
    "a negative rate": lambda folder: optim.SGD(lr=-1),
    "a rate in quotes": lambda folder: optim.SGD(lr="0.1"),
    "a momentum above 1": lambda folder: optim.SGD(lr=0.1, momentum=1.5),
    "an unknown optimizer": lambda folder: optim.create("adamm", lr=0.1),
    "a beta of 1": lambda folder: optim.Adam(lr=0.1, beta2=1),
    # trainers
    "a trainer of no parameters": lambda folder: hpcdp.Trainer([], optim.SGD(lr=0.1), world=thread_comm.alone()),
    "a trainer without an optimizer": lambda folder: hpcdp.Trainer(
        network().parameters(), 0.1, world=thread_comm.alone()
    ),
    "an unknown owner": lambda folder: trained(owner="shards"),
    "an unknown compression": lambda folder: trained(compression="3bit"),
    "a step without a backward": lambda folder: trained(backward=False),
    "a step of minus one sample": lambda folder: trained(count=-1),
    "a step of half a sample": lambda folder: trained(count=0.5),
    "trainers of other networks": on_two_ranks(
        lambda world: hpcdp.Trainer(nn.Dense(4, by_rank(2, 3)(world)).parameters(), optim.SGD(lr=0.1), world=world)
    ),
    # data
    "an unknown data set": lambda folder: data.load("mnits"),
    "an image file that is a text": lambda folder: data.read_idx(written(folder / "images.idx", "abc\n")),
    "a csv file that is not there": lambda folder: data.read_csv(folder / "train.csv"),
    "a csv file with a word among numbers": lambda folder: data.read_csv(written(folder / "a.csv", "1,2\n3,x\n")),
    "a part beyond the last": lambda folder: data.ShardedSampler(100, 10, num_parts=2, part_index=2),
    "a batch size of zero": lambda folder: data.ShardedSampler(100, 0, num_parts=1, part_index=0),
    "arrays of other lengths": lambda folder: data.ArrayDataset(np.ones(3), np.ones(4)),
    # stores
    "an unknown kind of store": lambda folder: kvstore.create("dist_snyc"),
    "a key that was not initialized": lambda folder: store().pull("v"),
    "a key that is initialized twice": lambda folder: store().init("w", ONES),
    "a push of another shape": lambda folder: store().push("w", np.ones(3, np.float32)),
    # checkpoints
    "restore where nothing was saved": lambda folder: checkpoint.Manager(folder, world=thread_comm.alone()).restore(),
    "restore of a step that was not saved": lambda folder: saved(folder).restore(step=9),
    "a state that cannot be saved": lambda folder: checkpoint.Manager(folder, world=thread_comm.alone()).save(
        1, {"f": len}
    ),
    "keep of zero checkpoints": lambda folder: checkpoint.Manager(folder, keep=0, world=thread_comm.alone()),
    # the command line and its settings
    "training settings: no epochs": lambda folder: TrainConfig(epochs=0),
    "training settings: unknown store": lambda folder: TrainConfig(kv_store="dist_snyc"),
    "hpcdp trian": lambda folder: main(["trian"]),
    "hpcdp train --epoch": lambda folder: main(["train", "lenet", "--epoch", "3"]),
    "hpcdp train --epochs many": lambda folder: main(["train", "lenet", "--epochs", "many"]),
    "hpcdp launch of no ranks": lambda folder: main(["launch", "-n", "0", "--", "python", "-V"]),
    "hpcdp launch of a missing program": lambda folder: main(["launch", "-n", "1", "--", "./no-such-program"]),
    "hpcdp checkpoint of a missing folder": lambda folder: main(["checkpoint", "ls", str(folder / "none")]),
}


def closed_world() -> World:
    with thread_comm.alone().split(0) as world:
        return world


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def message(mistake: Callable[[Path], object], folder: Path) -> str:
    """Return the kind and the text of what ``mistake`` raises, or what it writes to standard error."""
    with TemporaryDirectory() as errors:
        stderr, sys.stderr = sys.stderr, open(Path(errors, "stderr"), "w+")  # noqa: SIM115  closed below
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                result = mistake(folder)
            text = f"status {result}"
        except SystemExit as ending:
            text = f"status {ending.code}"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            sys.stderr.seek(0)
            said = sys.stderr.read().strip()
            sys.stderr.close()
            sys.stderr = stderr
    return "\n".join(filter(None, [text, said])).replace(str(folder), "FOLDER")


def messages(folder: Path) -> str:
    """Return all messages, each under the name of its mistake."""
    blocks = []
    for number, (name, mistake) in enumerate(MISTAKES.items()):
        own = folder / str(number)
        own.mkdir()
        lines = message(mistake, own).splitlines()
        blocks.append("\n".join([f"# {name}", *(f"  {line}" for line in lines)]))
    return "\n\n".join(blocks) + "\n"


def test_the_messages_are_those_that_were_read(tmp_path: Path) -> None:
    assert len(MISTAKES) == 60
    assert messages(tmp_path) == MESSAGES.read_text()


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        MESSAGES.write_text(messages(Path(folder)))
