"""The tensors of a checkpoint as files of other programs: NumPy's .npz, and safetensors.

PyTorch's own is `hpcdp.torch.state`. What each rank has for itself, such as random generators, is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.state import unquoted
from ..errors import ConfigError, DataError, HpcdpError, listed
from . import directory, flatten, inspect, manifest
from .directory import WriterLock
from .hdf5_file import ShardReader
from .inspect import pieces, read_whole, widened
from .manifest import Manifest, StoredTensor

Tell = Callable[[int], object]
"""Is told of so many bytes more that have been read."""
Writer = Callable[["Chosen", Path, Tell], None]
"""Writes what is chosen to a new file."""


@dataclass(frozen=True)
class Chosen:
    """What of a checkpoint is to be exported."""

    folder: Path
    step: int
    form: flatten.Form
    """The state, without what is per rank."""
    tensors: dict[str, StoredTensor]
    """By their new names."""
    manifest: Manifest
    others: list[str]
    """Names of what is no tensor."""
    per_rank: list[str]
    """Names of what was left out."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def choose(folder: Path, prefix: str = "") -> Chosen:
    """What is to be exported from the checkpoint in a folder.

    Args:
        prefix: only what lies below this name, with it taken off. "": all.

    Raises:
        ConfigError: there is no such name.
        DataError: the manifest is damaged.
    """
    found = manifest.read(folder)
    prefix = prefix.strip("/")
    form = found.state if not prefix else flatten.below(found.state, prefix)
    if form is None:
        tops = sorted({name.partition("/")[0] for name, _ in flatten.entries(found.state)})
        raise ConfigError("export", where="--name", expected=f"a name of the state, which has {listed(tops)}",
                          got=repr(prefix), remedy=inspect.remedy(found.state, prefix))  # fmt: skip
    per_rank = [name for name, node in flatten.leaves(form, prefix) if isinstance(node, dict) and "ranks" in node]
    form = flatten.without_ranks(form)
    tensors: dict[str, StoredTensor] = {}
    others = []
    for name, node in flatten.leaves(form):
        if isinstance(node, dict) and "tensor" in node:
            new = unquoted(name or prefix.rpartition("/")[2] or "state")
            if new in tensors:
                raise ConfigError("export", expected="names that differ", got=f"{new!r} twice")
            tensors[new] = found.tensors[node["tensor"]]
        else:
            others.append(name)
    if not tensors:
        raise ConfigError("export", where=f"--name {prefix}" if prefix else folder, expected="tensors", got="none")
    return Chosen(folder, found.step, form, tensors, found, others, per_rank)


def write(chosen: Chosen, path: Path, writer: Writer, overwrite: bool = False, tell: Tell = lambda nbytes: None) -> int:
    """Write a file that has its name only when it is complete; returns its bytes.

    Raises:
        ConfigError: the file exists, and not ``overwrite``; it would be in a checkpoint; its format cannot carry
            something.
        DataError: a file cannot be read or written, or another export writes this one; what was there stays.
    """
    if path.is_symlink():  # what it leads to is replaced
        path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():  # a device, too: what would have its name then is a file
        got = "a folder" if path.is_dir() else "what is no plain file"
        raise ConfigError("export", where=path, expected="a new file", got=got)
    if path.exists() and not overwrite:
        raise _there(path)
    if inspect.is_checkpoint(path.absolute().parent):
        raise ConfigError("export", where=path, expected="a place outside of checkpoints", got="one within")
    try:
        with _folder_beside(path) as own:
            if path.exists() and not overwrite:  # by now
                raise _there(path)
            torn = own / path.name
            with open(torn, "wb") as file:
                mode = os.fstat(file.fileno()).st_mode
            writer(chosen, torn, tell)
            with open(torn, "rb") as file:
                os.fchmod(file.fileno(), mode)  # as the umask has it: not all writers ask
                os.fsync(file.fileno())
            os.replace(torn, path)
    except HpcdpError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError("export", where=path, expected="a file that can be written", got=why) from error
    return path.stat().st_size


def _there(path: Path) -> ConfigError:
    return ConfigError("export", where=path, expected="a new file", got="a file that exists",
                       remedy="--overwrite replaces it")  # fmt: skip


@contextlib.contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """A folder for the file that is to be ``path``, and what its writer needs beside, which goes with what is in it.

    One export at a time has it. What one that was killed has left there is removed.

    Raises:
        DataError: another one has it, who is named; or a file has its name.
    """
    folder = path.with_name(path.name + ".part")
    if folder.exists() and not folder.is_dir():
        raise DataError("export", where=folder, expected="a folder, or nothing", got="a file", remedy="move it away")
    folder.mkdir(exist_ok=True)
    own = WriterLock(folder, "export")
    try:
        for left in folder.iterdir():
            if left.name != directory.NAME:
                left.unlink()
        own.require_held()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        own.release()


def write_npz(chosen: Chosen, path: Path, tell: Tell) -> None:
    """As NumPy's `savez`, by pieces. bfloat16, which NumPy does not have, becomes float32.

    Raises:
        ConfigError: an archive has no such name.
    """
    odd = next((name for name in chosen.tensors if "\0" in name), None)
    if odd is not None:
        raise ConfigError("export", where=repr(odd), expected="names without NUL, for an archive", got="one with it",
                          remedy="--format safetensors, or pt")  # fmt: skip
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive, ShardReader(chosen.folder, "export") as reader:
        for name, tensor in chosen.tensors.items():
            dtype = widened(np.empty(0, tensor.stored_dtype), tensor.dtype).dtype
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tensor.shape}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array_header_1_0(file, header)
                for piece in pieces(reader, tensor):
                    file.write(widened(piece, tensor.dtype).view(np.uint8).data)
                    tell(piece.nbytes)


_SAFETENSORS_DTYPES = {
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64",
}  # fmt: skip

_SAFETENSORS_OWN = "__metadata__"


def write_safetensors(chosen: Chosen, path: Path, tell: Tell) -> None:
    """By the package of that name, which takes all elements at once: they must fit in memory.

    Raises:
        ConfigError: the package is missing, or the format has no such dtype, or no such name.
        OSError: the file cannot be written.
    """
    try:
        import safetensors
    except ImportError as error:
        raise ConfigError(
            "export", expected="the package safetensors", got=f"{error}", remedy="pip install 'hpcdp[safetensors]'"
        ) from error
    odd = next((name for name, tensor in chosen.tensors.items() if tensor.dtype not in _SAFETENSORS_DTYPES), None)
    if odd is not None:
        raise ConfigError("export", where=odd, expected="a dtype that safetensors has",
                          got=chosen.tensors[odd].dtype, remedy="--format npz")  # fmt: skip
    if _SAFETENSORS_OWN in chosen.tensors:
        raise ConfigError("export", where=_SAFETENSORS_OWN, expected="names that safetensors has not for itself",
                          got="that of its metadata", remedy="--format npz, or pt")  # fmt: skip
    arrays = dict(read(chosen.folder, chosen.tensors, tell))
    specs = {name: safetensors.TensorSpec(dtype=chosen.tensors[name].dtype, shape=list(array.shape),
                                          data_ptr=array.ctypes.data, data_len=array.nbytes)
             for name, array in arrays.items()}  # fmt: skip
    try:
        safetensors.serialize_file(specs, path, {"format": "pt", "step": json.dumps(chosen.step)})
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error  # which `write` tells, with the name that the file was to have


def read(folder: Path, tensors: Mapping[str, StoredTensor], tell: Tell) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors, by the names that they have in ``tensors``; each a new array, of its stored dtype.

    Raises:
        DataError: a file is missing or damaged.
    """
    with ShardReader(folder, "export") as reader:
        for name, tensor in tensors.items():
            yield name, read_whole(reader, tensor)
            tell(tensor.nbytes)


WRITERS: dict[str, Writer] = {"npz": write_npz, "safetensors": write_safetensors}
"""By format."""
