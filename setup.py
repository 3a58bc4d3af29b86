"""Build step that copies the data folders beside the package into the wheel; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

DATA_FOLDERS = ("kernels", "slurm")


class BuildWithData(build_py):
    """Build the package, with the data folders in ``hpcdp/_data``, where `hpcdp.core.files` finds them."""

    def run(self) -> None:
        """Copy modules, then data; an editable install reads the clone's own folders."""
        super().run()
        if not self.editable_mode:
            for name in DATA_FOLDERS:
                shutil.copytree(name, Path(self.build_lib, "hpcdp", "_data", name), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithData})
