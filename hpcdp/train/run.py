"""A training run of ``hpcdp train`` on every rank: data, network and optimizer from settings, training, report."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import shlex
import signal
import socket
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from .. import data, kernels, kvstore, nn, optim
from ..autograd import record
from ..checkpoint import Manager
from ..collectives import allreduce
from ..comm import World, init
from ..comm import world as comm_world
from ..comm.consistency import on_every_rank, on_rank_0
from ..comm.world import device_of
from ..compression import pays_below
from ..core.arrays import MEMORY_LIMIT, Device, cpu
from ..core.environment import explained
from ..data_parallel.base_trainer import BaseTrainer
from ..data_parallel.bucket_trainer import BucketTrainer
from ..errors import ConfigError, HpcdpError, MismatchError, SaveError, Terminated, listed, reason
from ..kvstore.store_trainer import StoreTrainer
from ..nn import Module, models
from ..nn.functional import softmax_cross_entropy
from .callbacks import AdaptWorkLoad, Callback, EarlyStopping, KeepMetrics, KeepWorkLoad, ShowProgress
from .checkpoints import AUTO, Checkpoints, StopRequests
from .chrome_trace import Recording, check_path, traced
from .config import MEASURED, SEQUENCE_MODELS, TrainConfig, parse_work_load, uncollected
from .fit import SharedCount, fit
from .metrics import Record, evaluate, peak_memory_mb, perplexity
from .report import slowest_rank
from .run_dir import CHECKPOINTS, RunFolder, drop_empty_run_dir, is_finished, make_run_folder, open_run_folder
from .trainer import Trainer

_FOR_POOLS = 0.9
"""The fraction of a shared GPU's memory for the pools of its ranks; the rest is for allocations outside of pools."""


def choose_device(config: TrainConfig, world: World) -> Device:
    """Return this rank's device, and make a GPU the current one of this thread; every rank must call.

    Raises:
        ConfigError: the settings ask for GPUs, and some rank has none; on every rank.
    """
    if config.device == "gpu":
        on_every_rank(world.comm, lambda: require_gpu(world.device))
    elif config.device == "cpu" or config.for_host or "cpu" in world.comm.allgather_json(world.device.kind):
        return cpu()
    world.device.use()
    _share_memory(world)
    return world.device


def _share_memory(world: World) -> None:
    """Give ranks that share a GPU equal parts of its memory, unless CuPy has a limit already; every rank must call.

    Without a limit, the pool of one rank would keep memory that another rank needs.
    """
    uuid = next((gpu.uuid for gpu in comm_world.visible() if gpu.index == world.device.index), "")
    processes = {tuple(process) for process in world.comm.allgather_json([uuid, socket.gethostname(), os.getpid()])}
    sharing = sum(of_other == uuid for of_other, _, _ in processes)
    if sharing > 1 and not os.environ.get(MEMORY_LIMIT):
        world.device.limit_memory(_FOR_POOLS / sharing)


def require_gpu(device: Device) -> None:
    """Raise `ConfigError` unless ``device`` is a GPU, which needs a GPU and CuPy."""
    if device.kind != "gpu":
        got, remedy = "no GPU visible to CUDA's driver", "use a machine with a GPU, or --device cpu"
        if comm_world.visible():
            got, remedy = "no CuPy", "pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]', or use --device cpu"
        raise ConfigError("setting device", expected="a GPU for each rank, and CuPy", got=got, remedy=remedy)


def described(device: Device, world: World) -> str | None:
    """Describe the GPUs of all ranks; None for ranks on the host. Every rank must call."""
    if device.kind == "cpu":
        return None
    own = next(gpu for gpu in comm_world.visible() if gpu.index == device.index)
    gpus = world.comm.allgather_json([world.node, own.uuid, own.name])
    number = Counter(name for _, _, name in {tuple(gpu) for gpu in gpus})
    return ", ".join(f"{count} x {name}" for name, count in sorted(number.items()))


_IMAGE_SIZE = {"digits": 28}
"""Image sizes of enlarged data sets: the digits have 8x8 pixels, LeNet needs 28x28."""


def datasets(config: TrainConfig) -> tuple[data.Dataset, data.Dataset]:
    """Return the training and the test set, without communication. Raises ConfigError or DataError."""
    train_set, test_set = (
        data.load(config.data, split=split, root=config.data_dir, image_size=_IMAGE_SIZE.get(config.data))
        for split in ("train", "test")
    )
    return train_set, test_set


def augmentation(config: TrainConfig, dataset: data.Dataset) -> data.Augmentation | None:
    """Return the augmentation for the training samples of ``dataset``, if any. Raises ConfigError."""
    changes: list[data.RandomCrop | data.RandomFlip] = []
    if config.shift:
        changes.append(data.RandomCrop(padding=config.shift))
    if config.flip:
        changes.append(data.RandomFlip())
    if not changes:
        return None
    if len(dataset.sample_shape) != 3:
        raise ConfigError(
            f"setting {'shift' if config.shift else 'flip'}", expected="images (channels, height, width)",
            got=f"samples of shape {tuple(dataset.sample_shape)} in {config.data}",
        )  # fmt: skip
    augment, no_samples = data.Augmentation(*changes, seed=config.seed), np.empty(0, np.int64)
    augment(dataset[no_samples][0], no_samples, epoch=0)  # raises if images are too small
    return augment


def network(config: TrainConfig, dataset: data.Dataset, device: Device | None = None) -> nn.Module:
    """Return the network for the samples of ``dataset``, the same on every rank, on ``device``. Raises ConfigError."""
    net = models.create(
        config.model, input_shape=dataset.sample_shape, num_classes=dataset.num_classes, seed=config.seed
    )
    if config.dtype != "float32":
        net.to(config.dtype)
    return net if device is None or device.kind == "cpu" else net.to(device)


def optimizer(config: TrainConfig, steps: int, updates: int = 1) -> optim.Optimizer:
    """Return the optimizer with its learning rate schedule.

    Args:
        config: the settings.
        steps: steps of an epoch.
        updates: the number of updates per global batch, each with a part of the batch's gradient. Weight decay, and
            the rates of rules that normalize the gradient, are divided by it, so that a batch has the same effect.
    """
    base, decay = float(config.lr or 0), config.weight_decay
    if config.lr_batch_size is not None:
        base = optim.linear_scaling(base, config.batch_size, config.lr_batch_size)
    if config.optimizer != "sgd":
        base /= updates
    if config.optimizer != "adamw":  # AdamW multiplies its decay by the rate, which is already divided
        decay /= updates
    lr: float | optim.Schedule = base
    if config.schedule == "cosine":
        lr = optim.CosineSchedule(base, steps=config.epochs * steps)
    warmup_steps = round(config.warmup_epochs * steps)
    if warmup_steps:
        inner = lr if isinstance(lr, optim.Schedule) else optim.ConstantSchedule(lr)
        lr = optim.WarmupSchedule(inner, steps=warmup_steps)
    momentum = {"momentum": config.momentum} if config.optimizer in ("sgd", "lars") else {}
    return optim.create(config.optimizer, lr=lr, weight_decay=decay, **momentum)


def check(config: TrainConfig) -> None:
    """Check the settings by creating data sets, augmentation and network, before any rank starts.

    Also checks for a GPU, if the settings ask for one, and the path of the trace.
    """
    if config.device == "gpu":
        require_gpu(device_of(0))
    train_set, _ = datasets(config)
    network(config, train_set)
    augmentation(config, train_set)
    if config.trace is not None:
        check_path(config.trace)


def run(config: TrainConfig, stop: StopRequests | None = None) -> dict[str, Any]:
    """Train and evaluate as ``config`` says; every rank must call, with the same settings.

    Args:
        config: the settings; ``resume`` is None or the folder of a run, see `run_dir.settled`.
        stop: the requests for an early stop; None: only ``time_limit_s``.

    Rank 0 prints the progress, writes the run folder and prints the report. An invalid setting, missing data or an
    unusable run folder raises the same error on every rank. SIGINT ends the run with KeyboardInterrupt, SIGTERM with
    `Terminated`; the metrics until then stay in the run folder.

    Returns:
        ``stopped`` (whether the run stopped early, with a checkpoint), ``run_dir`` and ``records`` (one for each epoch
        of this start, see `fit`). A run that stopped early, or was already complete, has only these. Other runs have
        the numbers of the report, the same on every rank: ``test_accuracy``, ``test_loss``, ``perplexity`` (text only,
        else None), ``samples_per_s`` (training, all ranks), ``seconds`` (training), ``comm_s`` and ``comm_exposed_s``
        (mean over ranks), ``comm_hidden`` (fraction of ``comm_s`` hidden behind computation; None with one rank or a
        store), ``compute_s`` and ``data_s`` (mean over ranks), ``critical_path_s``, ``peak_memory_mb`` (largest rank),
        ``nbytes`` (`Trainer.nbytes` of this rank) and ``ranks``; and texts, or None: ``compression`` (its savings),
        ``gpus``, ``store`` (labels and texts) and ``trace``.

    Raises:
        SaveError: on every rank, after the report, if the run folder or the trace is incomplete.
    """
    world = init()
    config = config.for_world(world.size, 0 if world.whole is None else world.whole.num_servers)
    on_rank_0(world.comm, config.check_folders)  # before kernels are compiled
    if config.resume is not None and on_rank_0(world.comm, lambda: is_finished(config)):
        if world.rank == 0:
            print(_at_its_end(config.run_dir), flush=True)
        return {"stopped": False, "run_dir": config.run_dir, "records": []}
    if stop is None:
        stop = StopRequests(config.time_limit_s)
    with _interruptible(stop), threadpool_limits(config.threads, user_api="blas"), contextlib.ExitStack() as start:
        start.enter_context(uncollected())
        with explained("loading the data and the network", world.rank == 0):
            train_set, test_set = on_every_rank(world.comm, lambda: datasets(config))
            device = choose_device(config, world)
            net = on_every_rank(world.comm, lambda: network(config, train_set, device))
        with _ended_together(world), contextlib.ExitStack() as stack:
            recording = None if config.trace is None else stack.enter_context(traced(config.trace, world))
            with explained("loading kernels", world.rank == 0):
                _load_kernels(config, train_set, world, device)
                trainer = make_trainer(config, net, train_set, world)  # waits for the other ranks
            together = trainer.steps_together
            loader = on_every_rank(world.comm, lambda: make_loader(config, train_set, world, together, device))
            hybridize = device.kind == "gpu" if config.hybridize is None else config.hybridize
            net.hybridize(hybridize)
            config = make_run_folder(config, world)
            if world.rank == 0:
                stack.callback(drop_empty_run_dir, config)
            checkpoints = stack.enter_context(make_checkpoints(config, world, stop))
            folder = open_run_folder(config, world)
            callbacks: list[Callback] = []
            if isinstance(loader.sampler, data.ShardedSampler):
                shares = AdaptWorkLoad if config.work_load == MEASURED else KeepWorkLoad
                callbacks.append(shares(loader.sampler))
            stopping = config.early_stopping and EarlyStopping("test_loss", patience=config.early_stopping)
            if stopping:
                callbacks.append(stopping)
            if folder is not None:
                stack.enter_context(folder)
                callbacks += [ShowProgress(config.verbose), KeepMetrics(folder)]
                if config.resume is not None:
                    print(f"resuming {config.run_dir}", flush=True)
            start.close()
            stack.enter_context(np.errstate(all="ignore"))  # the losses show that a run diverges
            records = fit(
                net,
                trainer,
                loader,
                epochs=config.epochs,
                evaluate=lambda: evaluate(net, test_set, world, config.eval_batch_size, config.virtual_shards),
                callbacks=callbacks,
                checkpoints=checkpoints,
                world=world,
                hybridize=hybridize,
            )
    result: dict[str, Any] = {"stopped": checkpoints.stopped is not None, "run_dir": config.run_dir, "records": records}
    if checkpoints.stopped is None and records:
        result |= _result(config, records, trainer, world)
        result["gpus"] = described(device, world)
        result["trace"] = None if recording is None else _trace_text(recording)
    if folder is not None:
        if stopping and stopping.stop_training:
            last = records[-1]["epoch"]
            best = "never a number" if stopping.best is None else f"lowest after epoch {last - stopping.waited}"
            print(f"early stopping after epoch {last}: test loss was {best}")
        print(_closing_lines(result, checkpoints, folder), flush=True)
    if checkpoints.stopped is None:
        on_rank_0(world.comm, lambda: _require_complete(folder, recording))
    return result


@contextlib.contextmanager
def _ended_together(world: World) -> Iterator[None]:
    """Raise an error of every rank after rank 0 has completed the run folder, which it does while it unwinds.

    Rank 0 alone reports such an error. The other ranks end a second later, and the launcher then ends rank 0 too.
    """
    try:
        yield
    except HpcdpError as error:
        if error.is_on_every_rank and not isinstance(error, MismatchError):  # ranks in different calls cannot meet
            world.comm.barrier()
        raise


def _require_complete(*written: RunFolder | Recording | None) -> None:
    """Raise `SaveError` if a file of a completed run is incomplete."""
    for output in written:
        if output is not None and output.failure is not None:
            raise SaveError(
                "write the results of the run", where=output.path, got=reason(output.failure),
                remedy="free disk space there, or make it writable",
            )  # fmt: skip


def _closing_lines(result: dict[str, Any], checkpoints: Checkpoints, folder: RunFolder) -> str:
    run_dir, stopped = result["run_dir"], checkpoints.stopped
    if stopped is not None:
        return (
            f"stopped early  after step {stopped.position.total} ({stopped.reason})\n"
            f"checkpoint     {run_dir}/{CHECKPOINTS}\nresume with    hpcdp train --resume {shlex.quote(str(run_dir))}"
        )
    if not result["records"]:  # the newest checkpoint is damaged, and the one before has enough epochs
        return _at_its_end(run_dir)
    return report(result, folder.failure)


def _at_its_end(run_dir: str | None) -> str:
    return f"{run_dir}: this run is complete, there is nothing to resume"


@contextlib.contextmanager
def make_checkpoints(config: TrainConfig, world: World, stop: StopRequests) -> Iterator[Checkpoints]:
    """Create the checkpoints of the run, and lock their folder against other jobs; every rank must call."""
    with Manager(
        Path(str(config.run_dir)) / CHECKPOINTS, world, keep=config.keep, keep_every=config.keep_every
    ) as manager:
        manager.claim()
        yield Checkpoints(
            manager,
            every=AUTO if config.checkpoint_every is None else config.checkpoint_every,
            stop=stop,
            resume=config.resume is not None,
            config=dataclasses.asdict(config),
        )


def _load_kernels(config: TrainConfig, train_set: data.Dataset, world: World, device: Device) -> None:
    """Compile or load the kernels before training is timed, by a step of a temporary network."""
    net = network(config, train_set, device)
    x, y = (device.put(array) for array in train_set[np.arange(min(2, len(train_set)))])
    with record():
        losses = softmax_cross_entropy(net(x), y)
    losses.backward()
    flat, gradient = (device.put(np.zeros(1, np.float32)) for _ in range(2))
    rule = optimizer(config, steps=1)
    rule.update(flat, gradient, rule.init_state(flat), step=1)
    allreduce(np.zeros(1), world=world)
    if world.size > 1 and device.kind == "cpu":
        nothing, reducing = np.zeros((1, 1), np.float32), kernels.load("gradients")
        reducing.combine_into(nothing, 0, 0, 0, reducing.SUM)
        if rule.update_is_its_kernel:
            name, coefficients = rule.kernel(1, 1.0)
            arrays = rule.arrays_of(rule.init_state(flat))
            reducing.REDUCING_RULES[name](nothing, 0, 1, flat, *arrays, coefficients)


def make_trainer(config: TrainConfig, net: Module, train_set: data.Dataset, world: World) -> BaseTrainer:
    """Create the trainer of ``net``; every rank must call."""
    if config.kv_store is None:
        return Trainer(
            net.parameters(),
            optimizer(config, steps=math.ceil(len(train_set) / config.batch_size)),
            world=world,
            owner=config.owner,
            clip_norm=config.clip_norm,
            compression=config.compression,
            reproducible=config.reproducible,
            virtual_shards=config.virtual_shards,
            loss_scale=config.loss_scale or ("dynamic" if config.dtype == "float16" else 1.0),
        )
    store = kvstore.create(config.kv_store, world, staleness=config.staleness)
    updates = 1 if store.kind != "dist_async" else world.size
    steps = math.ceil(len(train_set) / (config.batch_size // updates))
    return Trainer(
        net.parameters(),
        optimizer(config, steps, updates),
        world=world,
        kvstore=store,
        update_on_kvstore=config.update_on_kvstore,
        compression=config.compression,
    )


def make_loader(
    config: TrainConfig, train_set: data.Dataset, world: World, together: bool, device: Device | None = None
) -> data.DataLoader:
    """Create the loader of this rank: parts of global batches, or shared batches if ranks do not step ``together``.

    Every rank must call.
    """
    part: dict[str, Any] = {"num_parts": world.size, "part_index": world.rank, "seed": config.seed}
    count, prefetch = len(train_set), 2
    sampler: data.ShardedSampler | data.VirtualShardSampler | data.SharedSampler
    if not together:
        prefetch = 1  # no other rank can take a prefetched batch, so a slow rank delays the others by one at most
        sampler = data.SharedSampler(count, config.batch_size // world.size, SharedCount(world), seed=config.seed)
    elif config.virtual_shards is None:
        shares = parse_work_load(config.work_load, world.size)
        sampler = data.ShardedSampler(count, config.batch_size, **part, weights=shares)
    else:
        sampler = data.VirtualShardSampler(count, config.batch_size, config.virtual_shards, **part)
    return data.DataLoader(train_set, sampler, prefetch, augment=augmentation(config, train_set), device=device)


@contextlib.contextmanager
def _interruptible(stop: StopRequests) -> Iterator[None]:
    """Let SIGTERM, which mpirun sends after Ctrl-C, unwind the run like Ctrl-C, so that its folder is completed.

    Does nothing if ``stop`` handles SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread() or stop.takes(signal.SIGTERM):
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _result(config: TrainConfig, records: list[Record], trainer: BaseTrainer, world: World) -> dict[str, Any]:
    seconds = sum(record["seconds"] for record in records)
    comm_s = sum(record["comm_s"] for record in records)
    exposed_s = sum(record["comm_exposed_s"] for record in records)
    measured = world.size > 1 and isinstance(trainer, BucketTrainer)
    return {
        "test_accuracy": records[-1]["test_accuracy"],
        "test_loss": records[-1]["test_loss"],
        "perplexity": perplexity(records[-1]["test_loss"]) if config.model in SEQUENCE_MODELS else None,
        "samples_per_s": sum(record["samples"] for record in records) / seconds,
        "seconds": seconds,
        "comm_s": comm_s,
        "comm_exposed_s": exposed_s,
        "comm_hidden": 1 - exposed_s / comm_s if measured and comm_s > 0 else None,
        **{name: sum(record[name] for record in records) for name in ("compute_s", "data_s", "critical_path_s")},
        "peak_memory_mb": max(world.comm.allgather_json(peak_memory_mb())),
        "nbytes": trainer.nbytes,
        "ranks": world.size,
        "compression": saved_by_compression(trainer),
        "store": _store_lines(trainer, records[-1]),
        "run_dir": config.run_dir,
        "records": records,
    }


def saved_by_compression(trainer: BaseTrainer) -> str | None:
    """Describe the bytes that compression saves between nodes; None without compression. Every rank must call."""
    if trainer.compression is None or not isinstance(trainer, BucketTrainer):
        return None
    sent, plain, num_ranks = trainer.reducer.node_nbytes()
    if not plain:
        return None
    rate = 8e-9 * pays_below(trainer.compression.codec, num_ranks)
    name = trainer.compression.codec.name
    return f"{name}, {sent / 1e6:.2f} of {plain / 1e6:.2f} MB a step and node; pays below {rate:.0f} Gbit/s"


def _store_lines(trainer: BaseTrainer, last: Record) -> list[tuple[str, str]]:
    """Return the lines of the report about the key-value store, if any, and the staleness of its pushes."""
    if not isinstance(trainer, StoreTrainer):
        return []
    who = "the store" if trainer.update_on_kvstore else "every rank"
    lines = [("store", f"{trainer.store.kind}, {who} updates")]
    if "staleness_mean" in last:
        pushes = f"{last['staleness_mean']:.1f} pushes, at most {last['staleness_max']:.0f}; waited for "
        pushes += f"{last['waited_s']:.2f} s per rank; {last['sent_nbytes'] / 1e6:,.1f} MB sent"
        lines.append(("staleness", pushes))
    return lines


_LABEL, _COLUMNS = 15, 80


def _line(label: str, value: str) -> str:
    """Format a line of the report, wrapped to 80 columns; names and paths are never broken."""
    return textwrap.fill(
        value, _COLUMNS, initial_indent=f"{label:<{_LABEL}}", subsequent_indent=" " * _LABEL,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _command(label: str, *arguments: str) -> str:
    """Format a shell command, continued on further lines by backslashes where it exceeds 80 columns."""
    lines = [f"{label:<{_LABEL}}{arguments[0]}"]
    for argument in arguments[1:]:
        if len(lines[-1]) + len(argument) + 3 <= _COLUMNS:
            lines[-1] += f" {argument}"
        else:
            lines[-1] += " \\"
            lines.append(" " * (_LABEL + 2) + argument)
    return "\n".join(lines)


def report(result: dict[str, Any], failure: OSError | None = None) -> str:
    """Return the report of a run: results, speed, files, and commands to continue with, in 80 columns."""
    ranks = "1 rank" if result["ranks"] == 1 else f"{result['ranks']} ranks"
    share = result["comm_s"] / result["seconds"]
    if result["ranks"] == 1:
        communication = "none, there is one rank"
    elif result["comm_hidden"] is None:
        communication = f"{result['comm_exposed_s']:.2f} s exposed per rank, {share:.1%} of the time"
    else:
        communication = (
            f"{result['comm_s']:.2f} s per rank, {share:.1%} of the time; {result['comm_exposed_s']:.2f} s exposed, "
            f"{result['comm_hidden']:.0%} hidden"
        )
    folder, quoted = result["run_dir"], shlex.quote(str(result["run_dir"]))
    lines = [
        *_diverged(result["records"]),
        ("test accuracy", f"{result['test_accuracy']:.4f}"),
        *([] if result["perplexity"] is None else [("perplexity", f"{result['perplexity']:.2f} a token")]),
        ("speed", f"{result['samples_per_s']:,.0f} samples/s over {ranks}, {result['seconds']:.1f} s of training"),
        *([] if result["gpus"] is None else [("GPUs", result["gpus"])]),
        ("communication", communication),
        *([] if result["compression"] is None else [("compression", result["compression"])]),
        *result["store"],
        *_times(result),
        ("memory", f"{result['peak_memory_mb']:,.0f} MB at most per rank"),
        ("held per rank", ", ".join(f"{name} {count / 1e6:,.2f} MB" for name, count in result["nbytes"].items())),
        ("run folder", f"{folder}" if failure is None else f"{folder}, not complete: {failure.strerror}"),
        *([] if result["trace"] is None else [("trace", result["trace"])]),
        *([("look at", f"{folder}/curves.png")] if failure is None else []),
    ]
    commands = [
        ("export", "hpcdp checkpoint export", quoted, "network.npz", "--name network"),
        ("run it again", "hpcdp train", f"--config {shlex.quote(f'{folder}/config.toml')}"),
    ]
    if failure is None and importlib.util.find_spec("tensorboard") is not None:
        commands.insert(0, ("TensorBoard", "tensorboard", f"--logdir {quoted}"))
    return "\n".join([_line(*line) for line in lines] + [_command(*command) for command in commands])


def _diverged(records: list[Record]) -> list[tuple[str, str]]:
    wrong = [record["epoch"] for record in records if not math.isfinite(record["loss"] + record["test_loss"])]
    return [("loss", f"not finite since epoch {wrong[0]}: try a smaller --lr, or --clip-norm")] if wrong else []


def _times(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the report about time per rank, critical path and slow ranks."""
    records = result["records"]
    seconds, path_s = result["seconds"], result["critical_path_s"]
    exposed_s = result["comm_exposed_s"] if result["ranks"] > 1 else 0.0
    other_s = max(0.0, seconds - result["compute_s"] - exposed_s - result["data_s"])
    path, _ = Counter(record["critical_path"] for record in records).most_common(1)[0]
    lines = [
        (
            "time per rank",
            f"compute {result['compute_s']:.2f} s, exposed communication {exposed_s:.2f}, "
            f"data {result['data_s']:.2f}, rest {other_s:.2f}",
        ),
        ("critical path", f"{path_s:.2f} s, {path_s / seconds:.0%} of the time: {path}"),
    ]
    if slowest := slowest_rank(records):
        lines.append(("slowest rank", slowest))
    named = Counter(name for record in records for name in record.get("stragglers", ()))
    if named:
        stragglers = [f"{name} ({times} epoch{'s' if times > 1 else ''})" for name, times in named.most_common()]
        lines.append(("stragglers", listed(stragglers, 2)))
    return lines


def _trace_text(recording: Recording) -> str:
    if recording.failure is not None:
        return f"not written: {recording.failure.strerror}"
    dropped = f", {recording.num_dropped:,} more dropped" if recording.num_dropped else ""
    return f"{recording.path}, {recording.num_slices:,} spans{dropped}: open it at ui.perfetto.dev"
