"""Export of a checkpoint's tensors to files of other programs: NumPy's .npz, and safetensors.

`hpcdp.torch.checkpoint_adapters` writes PyTorch's own format. States of single ranks, such as random generators, are
left out.
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
from ..errors import ConfigError, DataError, HpcdpError
from . import directory, flatten, inspect, manifest
from .directory import WriterLock
from .hdf5_file import ShardReader
from .inspect import pieces, read_whole, widened
from .manifest import Manifest, StoredTensor

Tell = Callable[[int], object]
"""A function that is called with numbers of bytes that were read, for a progress bar."""
Writer = Callable[["Chosen", Path, Tell], None]
"""A function that writes the chosen tensors to a new file."""


@dataclass(frozen=True)
class Chosen:
    """The part of a checkpoint to export."""

    folder: Path
    step: int
    form: flatten.Form
    """Form of the state, without entries per rank."""
    tensors: dict[str, StoredTensor]
    """Tensors by their names in the export."""
    manifest: Manifest
    others: list[str]
    """Names of entries that are not tensors."""
    per_rank: list[str]
    """Names of entries per rank, which are left out."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def choose(folder: Path, prefix: str = "") -> Chosen:
    """Choose the tensors to export from the checkpoint in a folder.

    Args:
        folder: the folder of the checkpoint.
        prefix: export only entries below this name, which is removed from their names; "" exports all.

    Raises:
        ConfigError: there is no such name.
        DataError: the manifest is damaged.
    """
    saved = manifest.read(folder)
    prefix = prefix.strip("/")
    form = saved.state if not prefix else flatten.below(saved.state, prefix)
    if form is None:
        raise inspect.no_such_name("export", saved.state, prefix, where="--name")
    per_rank = [name for name, node in flatten.leaves(form, prefix) if isinstance(node, dict) and "ranks" in node]
    form = flatten.without_ranks(form)
    tensors: dict[str, StoredTensor] = {}
    others = []
    for name, node in flatten.leaves(form):
        if isinstance(node, dict) and "tensor" in node:
            new = unquoted(name or prefix.rpartition("/")[2] or "state")
            if new in tensors:
                raise ConfigError("export", expected="names that differ", got=f"{new!r} twice")
            tensors[new] = saved.tensors[node["tensor"]]
        else:
            others.append(name)
    if not tensors:
        raise ConfigError("export", where=f"--name {prefix}" if prefix else folder, expected="tensors", got="none")
    return Chosen(folder, saved.step, form, tensors, saved, others, per_rank)


def write(chosen: Chosen, path: Path, writer: Writer, overwrite: bool = False, tell: Tell = lambda nbytes: None) -> int:
    """Write a temporary file, rename it to ``path`` when it is complete, and return its bytes.

    Raises:
        ConfigError: the file exists, and not ``overwrite``; it would be in a checkpoint; its format does not support
            a name or dtype.
        DataError: a file cannot be read or written, or another export writes this one; an old file is unchanged.
    """
    if path.is_symlink():  # replace the link's target
        path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():  # a device, too, which the rename would replace
        got = "a folder" if path.is_dir() else "something that is not a regular file"
        raise ConfigError("export", where=path, expected="a new file", got=got)
    if path.exists() and not overwrite:
        raise _exists(path)
    if inspect.is_checkpoint(path.absolute().parent):
        raise ConfigError("export", where=path, expected="a path outside of checkpoints", got="a path in one")
    try:
        with _folder_beside(path) as own:
            if path.exists() and not overwrite:  # made meanwhile
                raise _exists(path)
            partial = own / path.name
            with open(partial, "wb") as file:
                mode = os.fstat(file.fileno()).st_mode
            writer(chosen, partial, tell)
            with open(partial, "rb") as file:
                os.fchmod(file.fileno(), mode)  # that of the umask, which some writers ignore
                os.fsync(file.fileno())
            os.replace(partial, path)
    except HpcdpError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError("export", where=path, expected="a file that can be written", got=why) from error
    return path.stat().st_size


def _exists(path: Path) -> ConfigError:
    return ConfigError("export", where=path, expected="a new file", got="a file that exists",
                       remedy="pass --overwrite to replace it")  # fmt: skip


@contextlib.contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """Make and lock a temporary folder beside ``path``, and remove it at the end.

    Files of a killed export are removed.

    Raises:
        DataError: another export holds the lock, and is named; or a file has the folder's name.
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
    """Write a file as NumPy's `savez`, piece by piece, with bfloat16 as float32, because NumPy does not have it.

    Raises:
        ConfigError: a name has a NUL, which an archive's names cannot.
    """
    odd = next((name for name in chosen.tensors if "\0" in name), None)
    if odd is not None:
        raise ConfigError("export", where=repr(odd), expected="names without NUL, for an archive", got="one with it",
                          remedy="pass --format safetensors or --format pt")  # fmt: skip
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
    """Write a file by the package safetensors, for which all elements must fit in memory.

    Raises:
        ConfigError: the package is missing, or the format does not support a dtype or name.
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
        raise ConfigError("export", where=odd, expected="a dtype that safetensors supports",
                          got=chosen.tensors[odd].dtype, remedy="pass --format npz")  # fmt: skip
    if _SAFETENSORS_OWN in chosen.tensors:
        raise ConfigError("export", where=_SAFETENSORS_OWN, expected="names that safetensors does not reserve",
                          got="that of its metadata", remedy="pass --format npz or --format pt")  # fmt: skip
    arrays = dict(read(chosen.folder, chosen.tensors, tell))
    specs = {name: safetensors.TensorSpec(dtype=chosen.tensors[name].dtype, shape=list(array.shape),
                                          data_ptr=array.ctypes.data, data_len=array.nbytes)
             for name, array in arrays.items()}  # fmt: skip
    try:
        safetensors.serialize_file(specs, path, {"format": "pt", "step": json.dumps(chosen.step)})
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error  # `write` reports it with the final path


def read(folder: Path, tensors: Mapping[str, StoredTensor], tell: Tell) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each tensor's name and a new array of its stored dtype.

    Raises:
        DataError: a file is missing or damaged.
    """
    with ShardReader(folder, "export") as reader:
        for name, tensor in tensors.items():
            yield name, read_whole(reader, tensor)
            tell(tensor.nbytes)


WRITERS: dict[str, Writer] = {"npz": write_npz, "safetensors": write_safetensors}
"""Writers by format."""
