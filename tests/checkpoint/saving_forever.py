"""A program that saves one step after the other, until it is killed; every rank says which step is complete."""

import sys
from pathlib import Path

import samples

import hpcdp
from hpcdp.checkpoint import Manager
from hpcdp.comm import World, thread_comm


def save_for_ever(world: World, path: Path, wait: bool, complete, replacing: bool) -> None:
    """Saves steps after the last one, some twice if ``replacing``; calls ``complete`` with the last complete."""
    manager = Manager(path, world, keep=2)
    step = manager.latest() or 0
    while True:
        step += 0 if replacing and step and step % 3 == 0 else 1
        replacing = not replacing
        manager.save(step, samples.state(step, world), wait=wait)
        complete(step if wait else step - 1)


def in_threads(path: Path, wait: bool, replacing: bool, complete) -> None:
    """Two ranks in this process; ``complete`` is shared memory."""

    def note(step: int) -> None:
        complete.value = step

    thread_comm.run(2, lambda world: save_for_ever(world, path, wait, note, replacing))


if __name__ == "__main__":
    here = hpcdp.init()
    out = Path(sys.argv[1]).with_suffix(f".{here.rank}")
    save_for_ever(here, Path(sys.argv[1]), sys.argv[2] == "wait", lambda step: out.write_text(str(step)), False)
