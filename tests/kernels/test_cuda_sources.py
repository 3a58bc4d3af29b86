"""The CUDA sources compile for the GPUs that hpcdp is for; no GPU is needed, but nvcc or cuda-core.

They are one program here, each in a namespace of its own: most of the time of a compiler that is started for each goes
into its start. No source asks for which GPU it is compiled, so what compiles for one compiles for all.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hpcdp.core.files import data_folder
from hpcdp.kernels import cuda

ARCHITECTURES = (80, *(pytest.param(number, marks=pytest.mark.thorough) for number in (90, 100)))
"""A100; H100 and H200, B200, for which the same sources are only assembled otherwise."""

OPTIMIZED = bool(os.environ.get("HPCDP_TEST_THOROUGH"))
"""As for a real GPU: three times the work, and no other errors."""

_NAME = r"__global__ void (?:__launch_bounds__\(.*?\) )?(\w+)"

FILES = sorted(path.stem for path in data_folder("kernels").glob("*.cu"))


def _alone(file: str) -> str:
    text = cuda.source(file)
    macros = dict.fromkeys(re.findall(r"#define (\w+)", text))
    return f'namespace of_{file} {{\n#line 1 "{file}.cu"\n{text}\n}}\n' + "".join(f"#undef {each}\n" for each in macros)


@pytest.mark.parametrize("file", FILES)
def test_no_source_asks_for_the_architecture(file: str) -> None:
    assert "__CUDA_ARCH" not in cuda.source(file)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_compile(architecture: int, tmp_path: Path) -> None:
    program = "".join(_alone(file) for file in FILES)
    if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core"):
        code = _compiled_by_nvrtc(program, architecture)  # by which CuPy compiles
    elif shutil.which("nvcc"):
        code = _compiled_by_nvcc(program, architecture, tmp_path)
    else:
        pytest.skip("needs cuda-core (pip install 'cuda-core[cu13]'), or nvcc on PATH, to compile CUDA")
    names = {name for file in FILES for name in re.findall(_NAME, cuda.source(file))}
    assert names and all(name.encode() in code for name in names)


def _compiled_by_nvcc(program: str, architecture: int, folder: Path) -> bytes:
    (folder / "all.cu").write_text(program)
    options = [option.replace("--fmad", "-fmad") for option in cuda.OPTIONS]
    options.append("-Werror=all-warnings")
    if not OPTIMIZED:
        known = subprocess.run(["nvcc", "--help"], capture_output=True, text=True).stdout  # old ones do not
        options += ["-Xptxas", "-O0", *(["--Ofast-compile=max"] if "--Ofast-compile" in known else [])]
    command = ["nvcc", *options, "-cubin", f"-arch=sm_{architecture}", "-o", "all.cubin", "all.cu"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "all.cubin").read_bytes()


def _compiled_by_nvrtc(program: str, architecture: int) -> bytes:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        std="c++17", fma=False, arch=f"sm_{architecture}", ofast_compile=None if OPTIMIZED else "max",
        device_as_default_execution_space=True,  # as CuPy: CUDA 12 takes generic lambdas for the host's
    )  # fmt: skip
    return bytes(Program(program, "c++", options).compile("cubin").code)
