"""Every CUDA source compiles for the GPUs that hpcdp is for; no GPU is needed, but nvcc or cuda-core."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hpcdp import kernels
from hpcdp.kernels import cuda

ARCHITECTURES = (80, 90, 100) if os.environ.get("HPCDP_TEST_THOROUGH") else (80,)
"""A100, H100 and H200, B200. No source asks for which of them it is compiled, so what compiles for one does for all."""

FILES = sorted(path.stem for path in Path(kernels.__file__).parent.glob("*.cu"))


@pytest.mark.parametrize("file", FILES)
def test_no_source_asks_for_the_architecture(file: str) -> None:
    assert "__CUDA_ARCH" not in cuda.source(file)


@pytest.mark.parametrize("file", FILES)
def test_compiles_for_all_architectures(file: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core"):
        _compile_by_nvrtc(file)  # as CuPy does, and five times as fast
    elif shutil.which("nvcc"):
        _compile_by_nvcc(file, tmp_path)
    else:
        pytest.skip("needs cuda-core (pip install 'cuda-core[cu13]'), or nvcc on PATH, to compile CUDA")


def _compile_by_nvcc(file: str, folder: Path) -> None:
    (folder / f"{file}.cu").write_text(cuda.source(file))
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
    options = [option.replace("--fmad", "-fmad") for option in cuda.OPTIONS]
    command = ["nvcc", *options, "-Werror=all-warnings", "-fatbin", *targets, "-o", f"{file}.fatbin", f"{file}.cu"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / f"{file}.fatbin").stat().st_size > 1000


def _compile_by_nvrtc(file: str) -> None:
    from cuda.core import Program, ProgramOptions

    for number in ARCHITECTURES:
        options = ProgramOptions(std="c++17", fma=False, arch=f"sm_{number}")
        assert len(Program(cuda.source(file), "c++", options).compile("cubin").code) > 1000
