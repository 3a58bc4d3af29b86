"""One rank of a training job in which something goes wrong: ``python faulty_rank.py SCENARIO FOLDER JSON-OPTIONS``.

Steps are counted in ``FOLDER/step-RANK``, results go to ``FOLDER/result-RANK``. All is imported before
`hpcdp.init`: after it the other ranks would wait for an import, and report it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import hpcdp
from hpcdp import Policy, Trainer, nn, optim
from hpcdp.autograd import record
from hpcdp.errors import MismatchError, NonFiniteGradientError

WIDTH, CAP_MB = 400, 0.006
"""The first bucket, of 1 MiB, holds the last two layers; the others have one each."""


def model(width=WIDTH, depth=2, dtype="f4", backwards=False):
    layers = [nn.Dense(6, width), *(nn.Dense(width, width) for _ in range(depth)), nn.Dense(width, 3)]
    net = nn.Sequential(*layers)
    params = list(net.parameters())
    for number, param in enumerate(params):
        param.data = (np.random.default_rng(number).standard_normal(param.shape) / 20).astype(dtype)
    return net, params[::-1] if backwards else params


def trainer_of(params, world, rule=None, **options):
    rule = optim.SGD(lr=0.05, momentum=0.9) if rule is None else rule
    return Trainer(params, rule, world, bucket_cap_mb=CAP_MB, **options)


def batch(step, rank, count):
    rng = np.random.default_rng([step, rank])
    return rng.standard_normal((count, 6)).astype("f4"), rng.integers(0, 3, count)


def backward(net, x, y):
    with record():
        loss = nn.functional.softmax_cross_entropy(net(x), y)
    loss.backward()


def values(params):
    return np.concatenate([np.array(param.data).reshape(-1) for param in params])


def counts_of(step, rank):
    """Samples of a rank in a step: the last rank has fewer batches than the others."""
    return 0 if rank == 2 and step >= 3 else 1 + (rank + step) % 3


def train_for_ever(world, options, before=lambda step, net: None, rule=None):
    folder = Path(sys.argv[2])
    net, params = model()
    trainer = trainer_of(params, world, rule, owner=options["owner"], overlap=options["overlap"])
    steps = options.get("steps", 10**6)
    for step in range(steps):
        before(step, net)
        backward(net, *batch(step, world.rank, 4))
        trainer.step(4)
        if step < 10:
            (folder / f"step-{world.rank}").write_text(str(step))
    return values(params)


def fine(world, options):
    train_for_ever(world, options)


def raises_in_backward(world, options):
    def before(step, net):
        if step == 4 and world.rank == 1:
            note_time()
            param = net.parameters()[2]

            def fails(written):
                raise ValueError("the fault of this test")

            param.grad_hook = fails

    train_for_ever(world, options, before)


def raises_between_steps(world, options):
    def before(step, net):
        if step == 4 and world.rank == 1:
            note_time()
            raise ValueError("the fault of this test")

    train_for_ever(world, options, before)


def note_time():
    part = Path(sys.argv[2], f"fault.part-{os.getpid()}")
    part.write_text(str(time.time()))
    part.rename(part.with_name("fault"))


class StopsItself(optim.SGD):
    """Rank 1 is stopped in the middle of the update of its bucket number ``at``, counted over all steps."""

    stops_at = -1
    updates = 0

    def update(self, *args, **options):
        StopsItself.updates += 1
        if StopsItself.updates == StopsItself.stops_at:
            note_time()
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.2)  # the signal may reach another thread first
        super().update(*args, **options)


def stops_in_an_update(world, options):
    """With overlap, then without: two trainings of the same, and in the second one rank 1 is stopped."""
    results = []
    for overlap in (True, False):
        for stops_at in (-1, 4):
            StopsItself.updates, StopsItself.stops_at = 0, stops_at if world.rank == 1 else -1
            rule = StopsItself(lr=0.05, momentum=0.9)
            results.append(train_for_ever(world, options | {"overlap": overlap, "steps": 6}, rule=rule))
    return [result.tobytes().hex() for result in results]


def loops_and_stops(world, options):
    """Rank 1 loops, and the last rank is stopped."""

    def loops_for_ever():
        while True:
            time.sleep(0.001)  # the cores are others'

    def before(step, net):
        if step == 4 and world.rank == 1:
            note_time()
            loops_for_ever()
        if step == 4 and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    train_for_ever(world, options, before)


def allreduced(world):
    return hpcdp.allreduce(np.ones(4), "max", world, algorithm="ring").tolist()


def ends_early(world, options):
    """Rank 1 has fewer batches, and is at the end of its program."""
    for step in range(6):
        if step == 3:
            note_time()
            if world.rank == 1:
                return
        allreduced(world)


def comes_late(world, options):
    """Rank 1 lets the others wait, twice, which is no fault; and at the end rank 0 alone waits for the last updates."""

    def dawdles():
        time.sleep(1.4)

    allreduced(world)
    for _ in range(2):
        if world.rank == 1:
            dawdles()
        result = allreduced(world)
    net, params = model(width=1024, depth=3)
    trainer = trainer_of(params, world, overlap=True)
    for step in range(3):
        backward(net, *batch(step, world.rank, 8))
        trainer.step(8)
    return result, world.rank == 0 and bool(np.isfinite(values(params)).all())


def other_models(world, options):
    """What the error says, and after how long, when the last rank's model is another one."""
    results = {}
    last = world.rank == world.size - 1
    for name, other in {
        "shapes": {"width": WIDTH + 1},
        "dtypes": {"dtype": "f8"},
        "order": {"backwards": True},
        "number": {"depth": 3},
    }.items():
        world.barrier()
        began = time.monotonic()
        try:
            trainer_of(model(**(other if last else {}))[1], world)
        except MismatchError as error:
            results[name] = str(error), time.monotonic() - began
    return results


def fewer_batches(world, options):
    results = {}
    for owner in ("rank", "shard"):
        for overlap in (False, True):
            net, params = model()
            trainer = trainer_of(params, world, owner=owner, overlap=overlap)
            totals = []
            for step in range(6):
                count = counts_of(step, world.rank)
                if count:
                    backward(net, *batch(step, world.rank, count))
                totals.append(trainer.step(count))
            results[f"{owner} {overlap}"] = totals, values(params).tobytes().hex()
    return results


def not_finite(world, options):
    """A NaN in one sample of rank 1, in steps 1 and 3 of 5: what each policy counted, raised and left untouched."""
    results = {}
    for nonfinite in ("count", "skip", "raise"):
        for overlap in (False, True):
            net, params = model()
            trainer = trainer_of(params, world, overlap=overlap, policy=Policy(nonfinite=nonfinite))
            raised, untouched = [], []
            for step in range(5):
                x, y = batch(step, world.rank, 4)
                if step in (1, 3) and world.rank == 1:
                    x[2, 3] = np.nan
                before = values(params).tobytes()
                with np.errstate(invalid="ignore"):
                    backward(net, x, y)
                try:
                    trainer.step(4)
                except NonFiniteGradientError:
                    raised.append(step)
                if values(params).tobytes() == before:
                    untouched.append(step)
            results[f"{nonfinite} {overlap}"] = {
                "raised": raised, "untouched": untouched, "counted": trainer.num_nonfinite,
                "updates": trainer.step_count, "finite": bool(np.isfinite(values(params)).all()),
            }  # fmt: skip
    return results


def trainer_on_some_ranks(world, options):
    world.barrier()
    if world.rank == 0:
        note_time()
        trainer_of(model()[1], world)
    else:
        time.sleep(60)


def main():
    scenario, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    world = hpcdp.init()
    written = folder / f"pid-{world.rank}.part"
    written.write_text(str(os.getpid()))
    written.rename(folder / f"pid-{world.rank}")
    result = globals()[scenario](world, options)
    (folder / f"result-{world.rank}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
