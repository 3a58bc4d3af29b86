"""The settings of a run, by flags and by file.

The settings of one training run: their defaults, what is valid, and where they come from (flags, TOML).

Python's garbage collector, at rest while a program starts.

What one setting is: a dataclass field with its help text and what is valid for it, which is checked here.

What a run does where nobody has said otherwise, which depends on its network and on who updates.

Rates were found on the sets that ship with the package, docs/models.md says how; those of another set may be others.
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

from ...core import files
from ...core.checks import check_name
from ...errors import ConfigError


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is looked through for garbage meanwhile, where this process has not switched that off itself.

    Modules and compiled kernels make hundreds of thousands of objects that stay: to look through them over and over was
    a tenth of the time of a short job.
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
    """A dataclass field with its help text, its valid names, or its smallest value (itself excluded if ``above``) and
    its largest.

    A number may be the ``word`` instead.
    """
    metadata = {"help": about, "choices": choices, "least": least, "above": above, "most": most, "word": word}
    return dataclasses.field(default=default, metadata=metadata)


def parsed(field: dataclasses.Field[Any], kind: type, text: str | bool) -> Any:
    """The value that ``text`` of a command line is for a setting of the type ``kind``; `ConfigError` for another's."""
    if text == field.metadata["word"]:
        return text
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"setting {field.name}", expected=_expected(field, kind), got=repr(text)) from error


def typed(field: dataclasses.Field[Any], kind: type, value: Any) -> Any:
    """``value`` as the setting's type: an int serves as float, nothing else is converted.

    Raises:
        ConfigError: it is of another type, or not finite.
    """
    if kind is float and type(value) is int:
        return float(value)
    given: type = type(value)
    if given is str and value == field.metadata["word"]:
        return value
    if given is not kind:
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
    """Raises `ConfigError` unless ``value`` is one of the setting's names, or in its range."""
    if value == "":
        raise ConfigError(f"setting {field.name}", expected="a name", got="''")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"setting {field.name}", expected="a name, which has no NUL", got=repr(value))
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
    """As TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    return repr(value)


LEARNING_RATE, LATE_LEARNING_RATE, LARS_LEARNING_RATE = 0.05, 0.03, 1.0
"""For images. Late gradients push on when they should turn back, and so bear less; that of LARS is a part of another
length."""
SEQUENCE_LEARNING_RATES = {"char_lstm": 0.01, "gpt": 0.003}
"""Of AdamW and Adam, by network."""
SEQUENCE_CLIP_NORM = 1.0
"""Gradients through many steps are small but for a few that are large (Pascanu, Mikolov and Bengio 2013)."""

RATES = (
    f"{LEARNING_RATE}, with kv_store=dist_async {LATE_LEARNING_RATE}, with optimizer=lars {LARS_LEARNING_RATE:g}, "
    f"with adam and adamw {' and '.join(f'{lr} of {name}' for name, lr in SEQUENCE_LEARNING_RATES.items())}"
)
"""The rates, in words."""

SEQUENCE_MODELS = tuple(SEQUENCE_LEARNING_RATES)
TEXTS = ("shakespeare",)
"""Data sets that are for them alone."""


def usual(model: str, optimizer: str | None, kv_store: str | None) -> dict[str, Any]:
    """The values of the settings that depend on others, by name; those that were said count for the rest."""
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


AUTO = "auto"
"""``resume``: go on where there is something to go on from."""

_OF_SEVERAL = ("dist", "dist_sync", "dist_device_sync", "dist_async")
"""The kinds of key-value stores that several ranks can share."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a training run; ``None`` means "not said", see each setting.

    Checked when made: a wrong type, an unknown choice or a value out of range raises `ConfigError`, which names the
    setting, what was got and what is valid.
    """

    model: str = setting("lenet", "network to train: char_lstm, gpt, lenet, mlp, resnet18, resnet18_cifar")
    data: str = setting(
        None,
        "data set to train on: cifar10, digits, fashion_mnist, mnist, shakespeare (default: shakespeare for sequences, "
        "else digits)",
    )
    data_dir: str | None = setting(
        None,
        "the folder that holds NAME/, e.g. ~/data for ~/data/mnist (default: HPCDP_DATA_DIR, or ~/.cache/hpcdp/data)",
    )
    epochs: int = setting(20, "passes over the training set", least=1)
    early_stopping: int | None = setting(
        None, "end after so many epochs without a lower test loss (default: all epochs)", least=1
    )
    batch_size: int = setting(32, "samples a step over all ranks together (the global batch)", least=1)
    optimizer: str = setting(
        None, "update rule (default: sgd, of sequences adamw)", choices=("sgd", "adam", "adamw", "lars")
    )
    lr: float | None = setting(None, f"learning rate at the global batch (default: {RATES})", least=0.0, above=True)
    lr_batch_size: int | None = setting(
        None, "the global batch that lr is for, with another one it grows in proportion (default: lr stays)", least=1
    )
    momentum: float = setting(0.9, "momentum of sgd and lars; adam and adamw do not use it", least=0.0)
    weight_decay: float = setting(0.001, "weight decay per step, times the learning rate", least=0.0)
    schedule: str = setting("cosine", "how the learning rate falls", choices=("constant", "cosine"))
    warmup_epochs: float = setting(1.0, "epochs in which the learning rate rises linearly from 0", least=0.0)
    clip_norm: float | None = setting(
        None, "largest L2 norm of a step's mean gradient (default: any, of sequences 1)", least=0.0, above=True
    )
    seed: int = setting(0, "seed of the initial parameters and of the shuffles", least=0)
    shift: int = setting(
        None, "training images move by up to so many pixels, anew each epoch (default: 2, of sequences 0)", least=0
    )
    flip: bool = setting(False, "mirror about half of the training images left to right, anew each epoch")
    ranks: int | None = setting(None, "MPI ranks (default: those of the launcher, or 1)", least=1)
    kv_store: str | None = setting(
        None,
        "train on a key-value store (default: in buckets, without)",
        choices=("local", "device", *_OF_SEVERAL),
    )
    work_load: str | None = setting(
        None, "shares of the ranks in a batch, e.g. 3,1; or: measured, anew after each epoch (default: all alike)"
    )
    staleness: int | None = setting(
        None, "pushes by which a rank may lead the slowest one, with kv_store=dist_async (default: any)", least=0
    )
    update_on_kvstore: bool = setting(True, "the store updates, not every rank")
    servers: int | None = setting(None, "processes that serve keys beside the ranks (default: none)", least=0)
    owner: str = setting("auto", "who updates a parameter", choices=("auto", "rank", "shard"))
    compression: str | None = setting(
        None, "compress gradients between nodes: fp16, bf16, 2bit, 1bit, topk, e.g. topk:ratio=0.05"
    )
    dtype: str = setting(
        "float32",
        "of weights, activations and gradients; updates are in float32",
        choices=("float32", "float16", "bfloat16"),
    )
    loss_scale: float | str | None = setting(
        None,
        "how many times too large gradients are, or: dynamic (default: dynamic with dtype=float16, else 1)",
        least=0.0,
        above=True,
        word="dynamic",
    )
    reproducible: bool = setting(False, "the same bits on any number of ranks and nodes; slower")
    virtual_shards: int | None = setting(
        None,
        "pieces of a global batch with reproducible, at least one a rank; they decide the bits (default: 8)",
        least=1,
    )
    device: str = setting(
        "auto",
        "where ranks compute; auto: on GPUs where every rank has one, and the other settings can be followed there",
        choices=("auto", "cpu", "gpu"),
    )
    hybridize: bool | None = setting(
        None, "replay each step as one plan, on a GPU as one CUDA graph; the same bits (default: on GPUs)"
    )
    threads: int = setting(1, "BLAS threads per rank; to use more cores start more ranks", least=1, most=1024)
    eval_batch_size: int = setting(256, "samples a rank evaluates at once", least=1)
    run_dir: str | None = setting(None, "folder for the results (default: a new runs/MODEL-DATA-NNN)")
    overwrite: bool = setting(False, "replace the results of an earlier run in the run folder")
    checkpoint_every: int | str | None = setting(
        None,
        "steps between checkpoints, or: epoch (default: after each epoch and every five minutes, where that costs next "
        "to nothing; always at the end, and where a run is stopped)",
        least=1,
        word="epoch",
    )
    keep: int = setting(3, "checkpoints that are kept, the newest ones", least=1)
    keep_every: int | None = setting(None, "keep those of every so many steps, too", least=1)
    resume: str | None = setting(None, "run folder to go on in; auto: where there is one to go on in, else start anew")
    time_limit_s: float | None = setting(
        None, "save and stop after so many seconds, with exit status 75", least=0.0, above=True
    )
    trace: str | None = setting(None, "write what every rank did when to this file, for ui.perfetto.dev")

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
            from ...compression import Compression  # not before: NumPy would be loaded for --help, too

            Compression.of(self.compression)
        if self.work_load is not None:
            from ..load_balance import check_work_load  # not before, as above

            check_work_load(self)
        if self.reproducible:
            from ...data_parallel.deterministic import VIRTUAL_SHARDS  # other settings are read without the trainers

            object.__setattr__(self, "virtual_shards", self.virtual_shards or VIRTUAL_SHARDS)
        for is_broken, name, expected in self._rules():
            if is_broken:
                raise ConfigError(f"setting {name}", expected=expected, got=_shown(getattr(self, name)))
        if self.ranks is not None and self.batch_size < self.ranks:
            raise ConfigError(
                "setting batch_size",
                expected=f"at least one sample for each of the {self.ranks} ranks",
                got=self.batch_size,
                remedy="batch_size is the global batch: raise it, or lower ranks",
            )

    def _check_data(self) -> None:
        try:
            (self.data_dir or "").encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                "setting data_dir", expected="a name in UTF-8, as config.toml is", got=repr(self.data_dir),
                remedy="give it a link of such a name",
            ) from error  # fmt: skip
        if (self.model in SEQUENCE_MODELS) == (self.data in TEXTS):
            return
        from ...data.catalog import NAMES  # not before, as above
        from ...nn.models import MODELS

        if self.model not in MODELS:
            return  # `create` says what is wrong
        fitting = TEXTS if self.model in SEQUENCE_MODELS else [name for name in NAMES if name not in TEXTS]
        expected = f"with model={self.model} {' or '.join(fitting)}"
        raise ConfigError("setting data", expected=expected, got=self.data)

    def _rules(self) -> Iterator[tuple[bool, str, str]]:
        """Yield whether each rule about several settings is broken, by which of them, and what that should be."""
        yield self.momentum >= 1, "momentum", "a number in [0, 1)"
        yield self.warmup_epochs > self.epochs, "warmup_epochs", f"at most epochs = {self.epochs}"
        yield self.resume is not None and self.overwrite, "overwrite", "false with resume"
        is_elsewhere = self.resume not in (None, AUTO) and self.run_dir not in (None, self.resume)
        yield is_elsewhere, "run_dir", f"none with resume={self.resume}"
        if self.reproducible:
            yield self.compression is not None, "compression", "none with reproducible"
            yield self.threads != 1, "threads", "1 with reproducible"
            from ...data_parallel.deterministic import VIRTUAL_SHARDS  # other settings are read without the trainers

            shards, ranks = self.virtual_shards or VIRTUAL_SHARDS, self.ranks or 1
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

    @property
    def for_host(self) -> str | None:
        """The setting that can be followed on the host alone, if any."""
        if self.reproducible:
            return "reproducible"  # sums on GPUs have no fixed order
        if self.work_load == "measured":
            return "work_load=measured"  # what a rank's phases take is not what its GPU takes
        return None

    def for_world(self, size: int, num_servers: int = 0) -> TrainConfig:
        """These settings with ``ranks`` and ``servers`` as in the world that runs; an error if they say others."""
        for name, said, there in (("ranks", self.ranks, size), ("servers", self.servers, num_servers)):
            if said not in (None, there):
                raise ConfigError(
                    f"setting {name}",
                    expected=f"{there}, the {name} that the launcher started",
                    got=said,
                    remedy=f"leave --{name} out under mpirun or srun",
                )
        return dataclasses.replace(self, ranks=size, servers=num_servers or None)

    def to_toml(self) -> str:
        """One ``key = value`` line a setting, without those that are None; `load` reads it back."""
        given = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        return "".join(f"{key} = {toml_value(value)}\n" for key, value in given.items())


def read_toml(path: str | Path) -> dict[str, Any]:
    """What a TOML file of ``key = value`` lines says.

    Raises `ConfigError` for a missing or damaged file, or an unknown key (with the valid ones).
    """
    try:
        settings = files.read_toml(path)
    except OSError as error:
        raise ConfigError("read the configuration", where=path, got=error.strerror) from error
    except ValueError as error:
        raise ConfigError("read the configuration", where=path, expected="a TOML file", got=error) from error
    for key, value in settings.items():
        if isinstance(value, dict):
            raise ConfigError(
                "read the configuration",
                where=path,
                expected="settings at the top level, without tables",
                got=f"the table [{key}]",
            )
        check_name("setting", key, names(), where=path)
    return settings


def load(path: str | Path | None = None, flags: Mapping[str, Any] | None = None) -> TrainConfig:
    """The settings of a TOML file (`read_toml`), overridden by ``flags``; defaults for the rest.

    Raises `ConfigError` for what the file has wrong, or a bad value.
    """
    return merged({} if path is None else read_toml(path), flags or {}, path)


def merged(settings: Mapping[str, Any], flags: Mapping[str, Any], path: str | Path | None) -> TrainConfig:
    """The ``settings`` that were read from ``path``, overridden by ``flags``; see `load`."""
    for key in flags:
        check_name("setting", key, names())
    try:
        return TrainConfig(**{**settings, **flags})
    except ConfigError as error:
        if settings:
            TrainConfig(**flags)  # raises by itself where the file is not to blame
            error.where = path
        raise


def names() -> list[str]:
    """The names of all settings, in the order in which they are declared."""
    return [field.name for field in dataclasses.fields(TrainConfig)]


def kind_of(name: str) -> type:
    """The type of a setting that is not None: int, float, str or bool; of one that may be a word the other."""
    hint = _hints()[name]
    return typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint


@functools.cache  # each evaluation is of all settings, and every `TrainConfig` asks for each of them
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(TrainConfig)


def parse(name: str, text: str | bool) -> Any:
    """The value of setting ``name`` from a command line; `ConfigError` where ``text`` is of another type."""
    return parsed(TrainConfig.__dataclass_fields__[name], kind_of(name), text)
