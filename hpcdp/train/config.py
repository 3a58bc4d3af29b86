"""The settings of a training run: defaults, valid values, and their sources (flags and TOML files).

Some defaults depend on the network and the optimizer. The learning rates were tuned on the data sets of the package,
as docs/models.md describes; other data sets may need other rates. The command line imports this module before NumPy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core import files
from ..core.checks import check_name
from ..errors import ConfigError, reason


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection within the block.

    Modules and compiled kernels create hundreds of thousands of permanent objects. Scanning them repeatedly took a
    tenth of the time of a short job.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_TYPE_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def setting(
    default: Any,
    about: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    above: bool = False,
    most: float | None = None,
    word: str | None = None,
):
    """Return a dataclass field of a setting.

    Args:
        default: the default value.
        about: the help text.
        choices: the valid names.
        least: the smallest valid number.
        above: exclude ``least`` itself.
        most: the largest valid number.
        word: a string that is valid instead of a number.
    """
    metadata = {"help": about, "choices": choices, "least": least, "above": above, "most": most, "word": word}
    return dataclasses.field(default=default, metadata=metadata)


def typed(field: dataclasses.Field[Any], kind: type, value: Any) -> Any:
    """Return ``value`` as the setting's type: an int is converted to a float, nothing else is.

    Raises:
        ConfigError: the value has another type, or is not finite.
    """
    if kind is float and type(value) is int:
        return float(value)
    actual: type = type(value)
    if actual is str and value == field.metadata["word"]:
        return value
    if actual is not kind:
        raise ConfigError(f"setting {field.name}", expected=_expected(field, kind), got=repr(value))
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"setting {field.name}", expected="a finite number", got=value)
    return value


def _shown(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _expected(field: dataclasses.Field[Any], kind: type) -> str:
    word = field.metadata["word"]
    return _TYPE_NAMES[kind] + (f" or {word!r}" if word else "")


def check_range(field: dataclasses.Field[Any], value: Any) -> None:
    """Raise `ConfigError` unless ``value`` is one of the setting's names, or in its range."""
    if value == "" or (isinstance(value, str) and "\0" in value):
        raise ConfigError(f"setting {field.name}", expected="a non-empty string without NUL", got=repr(value))
    if field.name == "data" and isinstance(value, str) and ("/" in value or "." in value):
        remedy = "for your own files write a program with hpcdp.data and hpcdp.Trainer"
        valid = f"one of {', '.join(field.metadata['choices'])}"
        raise ConfigError("setting data", expected=valid, got=repr(value), remedy=remedy)
    if field.metadata["choices"]:
        check_name(field.name, value, field.metadata["choices"])
    least, most, above = (field.metadata[name] for name in ("least", "most", "above"))
    if isinstance(value, str):
        return
    if least is not None and (value < least or (above and value == least)):
        bound = f"{'more than' if above else 'at least'} {least:g}"
        raise ConfigError(f"setting {field.name}", expected=bound, got=value)
    if most is not None and value > most:
        raise ConfigError(f"setting {field.name}", expected=f"at most {most:g}", got=value)


def toml_value(value: Any) -> str:
    """Format a value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    return repr(value)


LEARNING_RATE, LATE_LEARNING_RATE, LARS_LEARNING_RATE = 0.05, 0.03, 1.0
"""Learning rates for images. Stale gradients need a smaller rate. The rate of LARS is relative to the norm of the
parameters."""
SEQUENCE_LEARNING_RATES = {"char_lstm": 0.01, "gpt": 0.003}
"""Learning rates of AdamW and Adam, by network."""
SEQUENCE_CLIP_NORM = 1.0
"""The clipping norm for sequences, where a few gradients through many steps are very large (Pascanu, Mikolov and
Bengio 2013)."""

RATES = (
    f"{LEARNING_RATE}; with --kv-store dist_async {LATE_LEARNING_RATE}; with lars {LARS_LEARNING_RATE:g}; with adam or "
    f"adamw {' and '.join(f'{lr} for {name}' for name, lr in SEQUENCE_LEARNING_RATES.items())}"
)
"""The rates, in words."""

SEQUENCE_MODELS = tuple(SEQUENCE_LEARNING_RATES)
TEXTS = ("shakespeare",)
"""Data sets for sequence models only."""
MODELS = ("char_lstm", "gpt", "lenet", "mlp", "resnet18", "resnet18_cifar")
DATA = ("cifar10", "digits", "fashion_mnist", "mnist", *TEXTS)
"""All networks and data sets, whose modules load NumPy."""


def usual(model: str, optimizer: str | None, kv_store: str | None) -> dict[str, Any]:
    """Return the defaults that depend on other settings, by name."""
    is_sequence = model in SEQUENCE_MODELS
    optimizer = optimizer or ("adamw" if is_sequence else "sgd")
    if is_sequence and optimizer in ("adam", "adamw"):
        lr = SEQUENCE_LEARNING_RATES[model]
    elif kv_store == "dist_async":
        lr = LATE_LEARNING_RATE
    else:
        lr = LARS_LEARNING_RATE if optimizer == "lars" else LEARNING_RATE
    return {
        "data": TEXTS[0] if is_sequence else "digits",
        "optimizer": optimizer,
        "lr": lr,
        "shift": 0 if is_sequence else 2,
        "clip_norm": SEQUENCE_CLIP_NORM if is_sequence and kv_store is None else None,
    }


CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run folder."""


def has_results(folder: Path) -> ConfigError:
    """Return the error for a new run in the folder of an earlier one."""
    return ConfigError(
        "run folder exists and is not empty",
        where=folder,
        remedy="choose another --run-dir, or add --resume auto or --overwrite",
    )


def no_checkpoint(folder: Path, got: str) -> ConfigError:
    """Return the error for a run that cannot be resumed from ``folder``."""
    return ConfigError(
        "resume", where=folder, expected=f"a checkpoint in {folder / CHECKPOINTS}", got=got,
        remedy="name another run folder, or leave --resume out",
    )  # fmt: skip


AUTO = "auto"
"""The value of ``resume`` that resumes if there is a checkpoint, and else starts a new run."""

_OF_SEVERAL = ("dist", "dist_sync", "dist_device_sync", "dist_async")
"""The kinds of key-value stores that several ranks can share."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a training run, checked on construction; ``None`` stands for the default of each setting.

    Raises:
        ConfigError: a setting has a wrong type, an unknown choice or a value out of range, or conflicts with another.
    """

    model: str = setting("lenet", "network to train", choices=MODELS)
    data: str = setting(None, f"data set to train on (default: {TEXTS[0]} for sequences, else digits)", choices=DATA)
    data_dir: str | None = setting(
        None,
        "folder of data sets, e.g. ~/data for ~/data/mnist (default: HPCDP_DATA_DIR, or ~/.cache/hpcdp/data)",
    )
    epochs: int = setting(20, "passes over the training set", least=1)
    early_stopping: int | None = setting(
        None, "stop after N epochs without a lower test loss (default: train all epochs)", least=1
    )
    batch_size: int = setting(32, "samples per step, of all ranks together: the global batch", least=1)
    optimizer: str = setting(
        None, "update rule (default: sgd; for text adamw)", choices=("sgd", "adam", "adamw", "lars")
    )
    lr: float | None = setting(None, f"learning rate at the global batch (default: {RATES})", least=0.0, above=True)
    lr_batch_size: int | None = setting(
        None,
        "global batch for which --lr is meant; scale the rate in proportion to --batch-size (default: do not scale)",
        least=1,
    )
    momentum: float = setting(0.9, "momentum of sgd and lars", least=0.0)
    weight_decay: float = setting(0.001, "weight decay per step, times the learning rate", least=0.0)
    schedule: str = setting("cosine", "how the learning rate decays", choices=("constant", "cosine"))
    warmup_epochs: float = setting(1.0, "epochs in which the learning rate increases linearly from 0", least=0.0)
    clip_norm: float | None = setting(
        None, "scale the mean gradient down to at most this L2 norm (default: off; for text 1)", least=0.0, above=True
    )
    seed: int = setting(0, "seed of the initial parameters and of the order of samples", least=0)
    shift: int = setting(
        None, "shift each training image at random by up to N pixels (default: 2; for text 0)", least=0
    )
    flip: bool = setting(False, "mirror half of the training images left to right, at random")
    ranks: int | None = setting(None, "MPI ranks to start (default: 1; under mpirun or srun its ranks)", least=1)
    kv_store: str | None = setting(
        None,
        "train on a key-value store of this kind (default: without a store)",
        choices=("local", "device", *_OF_SEVERAL),
    )
    work_load: str | None = setting(
        None, "shares of the ranks in a batch, e.g. 3,1; measured: by their speed in each epoch (default: equal shares)"
    )
    staleness: int | None = setting(
        None, "with --kv-store dist_async: pushes that a rank may be ahead of the slowest (default: no limit)", least=0
    )
    update_on_kvstore: bool = setting(True, "let the store update parameters, not every rank")
    servers: int | None = setting(
        None, "processes that hold the keys of a store, besides the ranks (default: none)", least=0
    )
    owner: str = setting(
        "auto", "who updates: every rank all parameters, or each rank its shard", choices=("auto", "rank", "shard")
    )
    compression: str | None = setting(
        None, "compress gradients between nodes: fp16, bf16, 2bit, 1bit, topk or e.g. topk:ratio=0.05"
    )
    dtype: str = setting(
        "float32",
        "type of weights, activations and gradients; updates are in float32",
        choices=("float32", "float16", "bfloat16"),
    )
    loss_scale: float | str | None = setting(
        None,
        "factor by which gradients are scaled, or dynamic (default: dynamic with --dtype float16, else 1)",
        least=0.0,
        above=True,
        word="dynamic",
    )
    reproducible: bool = setting(False, "give the same bits on any number of ranks and nodes; slower")
    virtual_shards: int | None = setting(
        None,
        "with --reproducible: pieces of a global batch, at least one per rank (default: 8)",
        least=1,
    )
    device: str = setting(
        "auto",
        "where ranks compute; auto: on GPUs if every rank has one and all settings support them",
        choices=("auto", "cpu", "gpu"),
    )
    hybridize: bool | None = setting(
        None, "trace a step once and replay it, on GPUs as a CUDA graph; the same bits (default: only on GPUs)"
    )
    threads: int = setting(1, "BLAS threads per rank; to use more cores, start more ranks", least=1, most=1024)
    eval_batch_size: int = setting(256, "samples that a rank evaluates at once", least=1)
    run_dir: str | None = setting(None, "folder of the results (default: a new runs/MODEL-DATA-NNN)")
    overwrite: bool = setting(False, "replace the results of an earlier run in the run folder")
    checkpoint_every: int | str | None = setting(
        None,
        "steps between checkpoints, or epoch; the end and a stop always save one (default: after each epoch and every "
        "five minutes, if that takes less than a twentieth of the time)",
        least=1,
        word="epoch",
    )
    keep: int = setting(3, "keep the newest N checkpoints", least=1)
    keep_every: int | None = setting(None, "also keep the checkpoints of every N-th step", least=1)
    resume: str | None = setting(
        None,
        "continue the run in this folder; auto: that in --run-dir, else the newest unfinished run with these settings, "
        "else a new one",
    )
    time_limit_s: float | None = setting(
        None, "save and stop after X seconds, with exit status 75", least=0.0, above=True
    )
    trace: str | None = setting(None, "write a timeline of all ranks to this file, for ui.perfetto.dev")
    verbose: bool = setting(False, "print after each epoch how its time was spent")

    def __post_init__(self) -> None:
        for name, value in usual(self.model, self.optimizer, self.kv_store).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                value = typed(field, kind_of(field.name), value)
            object.__setattr__(self, field.name, value)
            if value is not None:
                check_range(field, value)
        self._check_data()
        if self.compression is not None:
            from ..compression import Compression  # imported late: --help must not load NumPy

            Compression.of(self.compression)
        if self.work_load is not None:
            parse_work_load(self.work_load, self.ranks)
            if self.reproducible or self.kv_store == "dist_async":
                got = "reproducible" if self.reproducible else f"kv_store={self.kv_store}"
                raise ConfigError(
                    "setting work_load", expected="ranks that step together, on shares of a batch", got=got
                )
        if self.reproducible and self.virtual_shards is None:
            from ..data_parallel.deterministic import VIRTUAL_SHARDS  # imported late, as above

            object.__setattr__(self, "virtual_shards", VIRTUAL_SHARDS)
        for is_broken, name, expected in self._rules():
            if is_broken:
                raise ConfigError(f"setting {name}", expected=expected, got=_shown(getattr(self, name)))
        if self.ranks is not None and self.batch_size < self.ranks:
            raise ConfigError(
                "setting batch_size",
                expected=f"at least one sample for each of the {self.ranks} ranks",
                got=self.batch_size,
                remedy="increase batch_size, which is that of the global batch, or use fewer ranks",
            )

    def _check_data(self) -> None:
        try:
            (self.data_dir or "").encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                "setting data_dir", expected="a name in UTF-8, which config.toml requires", got=repr(self.data_dir),
                remedy="pass a symbolic link with such a name",
            ) from error  # fmt: skip
        if (self.model in SEQUENCE_MODELS) == (self.data in TEXTS):
            return
        fitting = TEXTS if self.model in SEQUENCE_MODELS else [name for name in DATA if name not in TEXTS]
        expected = f"{' or '.join(fitting)} with model={self.model}"
        raise ConfigError("setting data", expected=expected, got=self.data)

    def _rules(self) -> Iterator[tuple[bool, str, str]]:
        """Yield for each rule about several settings: whether it is broken, by which setting, and the valid values."""
        yield self.momentum >= 1, "momentum", "a number in [0, 1)"
        yield self.warmup_epochs > self.epochs, "warmup_epochs", f"at most epochs = {self.epochs}"
        yield self.resume is not None and self.overwrite, "overwrite", "false with resume"
        is_elsewhere = self.resume not in (None, AUTO) and self.run_dir not in (None, self.resume)
        yield is_elsewhere, "run_dir", f"none with resume={self.resume}"
        if self.reproducible:
            yield self.compression is not None, "compression", "none with reproducible"
            yield self.threads != 1, "threads", "1 with reproducible"
            shards, ranks = self.virtual_shards or 0, self.ranks or 1
            yield self.batch_size < shards, "batch_size", f"at least one for each of the {shards} virtual shards"
            yield shards < ranks, "virtual_shards", f"at least one for each of the {ranks} ranks"
        else:
            yield self.virtual_shards is not None, "virtual_shards", "none without reproducible"
        yield self.device == "gpu" and self.for_host is not None, "device", f"auto or cpu with {self.for_host}"
        kind = self.kv_store
        yield kind != "dist_async" and self.staleness is not None, "staleness", "none without kv_store=dist_async"
        yield kind != "dist_async" and bool(self.servers), "servers", "0 without kv_store=dist_async"
        yield self.staleness == 0 and bool(self.servers), "servers", "0 with staleness=0, which is dist_sync"
        is_on_worker = kind in (None, "dist_async") and not self.update_on_kvstore
        yield is_on_worker, "update_on_kvstore", f"true with kv_store={kind}"
        if kind is not None:
            yield self.optimizer == "lars", "optimizer", "sgd, adam or adamw with kv_store"
            for name, alone in (("owner", "auto"), ("clip_norm", None), ("dtype", "float32"), ("loss_scale", None),
                                ("reproducible", False)):  # fmt: skip
                yield getattr(self, name) != alone, name, f"{_shown(alone)} with kv_store"
            is_alone = kind in ("local", "device") and self.ranks not in (None, 1)
            yield is_alone, "kv_store", f"{' or '.join(_OF_SEVERAL)} for {self.ranks} ranks"

    def check_folders(self) -> None:
        """Raise `ConfigError` if a folder shows without NumPy that the run cannot begin; nothing is written.

        It goes before slow steps; `run_dir.reserve_run_dir` and `run_dir.settled` find the rest.
        """
        if self.resume not in (None, AUTO) and not Path(str(self.resume)).is_dir():
            raise no_checkpoint(Path(str(self.resume)), "no such folder")
        if self.run_dir is not None and self.resume is None and not self.overwrite:
            folder = Path(self.run_dir)
            with contextlib.suppress(OSError):
                if any(path.name != CHECKPOINTS for path in folder.iterdir()):
                    raise has_results(folder)

    @property
    def for_host(self) -> str | None:
        """The setting that only the host supports, if any."""
        if self.reproducible:
            return "reproducible"  # sums on GPUs have no fixed order
        if self.work_load == "measured":
            return "work_load=measured"  # the host's times of a rank's phases are not those of its GPU
        return None

    def for_world(self, size: int, num_servers: int = 0) -> TrainConfig:
        """Return the settings with the ``ranks`` and ``servers`` of the running world.

        Raises:
            ConfigError: the settings have other numbers.
        """
        for name, value, actual in (("ranks", self.ranks, size), ("servers", self.servers, num_servers)):
            if value not in (None, actual):
                raise ConfigError(
                    f"setting {name}", expected=f"{actual}, the {name} that the launcher started", got=value,
                    remedy=f"leave --{name} out under mpirun or srun",
                )  # fmt: skip
        return dataclasses.replace(self, ranks=size, servers=num_servers or None)

    def to_toml(self) -> str:
        """Return one ``key = value`` line for each setting that is not None; `load` reads them."""
        values = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        return "".join(f"{key} = {toml_value(value)}\n" for key, value in values.items())


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the settings of a TOML file of ``key = value`` lines.

    Raises:
        ConfigError: the file is missing or damaged, or has an unknown key.
    """
    try:
        settings = files.read_toml(path)
    except OSError as error:
        raise ConfigError("read the configuration", where=path, expected="a TOML file", got=reason(error)) from error
    except ValueError as error:
        raise ConfigError("read the configuration", where=path, expected="a TOML file", got=error) from error
    for key, value in settings.items():
        if isinstance(value, dict):
            raise ConfigError(
                "read the configuration", where=path, expected="top-level settings without tables",
                got=f"the table [{key}]",
            )  # fmt: skip
        check_name("setting", key, names(), where=path)
    return settings


def load(path: str | Path | None = None, flags: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the settings of a TOML file (`read_toml`), overridden by ``flags``, with defaults for the rest.

    Raises:
        ConfigError: the file or a value is invalid.
    """
    return merged({} if path is None else read_toml(path), flags or {}, path)


def merged(settings: Mapping[str, Any], flags: Mapping[str, Any], path: str | Path | None) -> TrainConfig:
    """Return the ``settings`` read from ``path``, overridden by ``flags``; see `load`."""
    for key in flags:
        check_name("setting", key, names())
    try:
        return TrainConfig(**{**settings, **flags})
    except ConfigError as error:
        if settings:
            TrainConfig(**flags)  # raises its own error if the flags are to blame, not the file
            error.where = path
        raise


def names() -> list[str]:
    """Return the names of all settings in the order of their declaration."""
    return [field.name for field in dataclasses.fields(TrainConfig)]


def kind_of(name: str) -> type:
    """Return the type of a setting, int, float, str or bool, ignoring None and words instead of numbers."""
    hint = _hints()[name]
    return typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint


@functools.cache  # evaluates the hints of all settings, and every `TrainConfig` needs each of them
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(TrainConfig)


def parse(name: str, text: str | bool) -> Any:
    """Return the value of setting ``name`` from a command line; `ConfigError` if ``text`` has another type."""
    field, kind = TrainConfig.__dataclass_fields__[name], kind_of(name)
    if text == field.metadata["word"]:
        return text
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"setting {name}", expected=_expected(field, kind), got=repr(text)) from error


MEASURED = "measured"
"""The setting for shares that follow the speed of ranks."""


def parse_work_load(text: str | None, ranks: int | None) -> list[float] | None:
    """Return the shares of a setting, one per rank; None if they are equal or measured.

    Args:
        text: comma-separated numbers, `MEASURED` or None.
        ranks: the number of shares; None: any number.

    Raises:
        ConfigError: the text is invalid, or has another number of shares.
    """
    if text in (None, MEASURED):
        return None
    try:
        shares = [float(share) for share in str(text).split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share < float("inf") for share in shares) or len(shares) != (ranks or len(shares)):
        count = "a positive number per rank" if ranks is None else f"{ranks} positive numbers"
        raise ConfigError("setting work_load", expected=f"{count}, comma-separated, or {MEASURED!r}", got=repr(text))
    return shares
