"""Floor 0: data_files, the folders of files that are data and not Python. Imports: nothing."""

from __future__ import annotations

from pathlib import Path


def data_folder(name: str) -> Path:
    """Return the folder of data files ``name``: ``"kernels"`` (CUDA sources) or ``"slurm"`` (batch templates).

    A wheel has them inside the package, where `setup.py` copies them. In a clone, also one that is installed as
    editable, they stand beside the package.
    """
    package = Path(__file__).resolve().parent
    shipped = package / "_data" / name
    return shipped if shipped.is_dir() else package.parent / name
