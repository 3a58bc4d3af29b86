"""The CUDA sources compile for the GPUs that hpcdp is for; no GPU is needed, but nvcc or cuda-core.

They are one program here, each in a namespace of its own: most of the time of a compiler that is started for each goes
into its start. No source asks for which GPU it is compiled, so nvcc reads them once, and assembles for each GPU.
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

ARCHITECTURES = (80, 90, 100)
"""A100, H100 and H200, B200."""

OPTIMISED = bool(os.environ.get("HPCDP_TEST_THOROUGH"))
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


def test_all_compile_for_all_architectures(tmp_path: Path) -> None:
    program = "".join(_alone(file) for file in FILES)
    if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core"):
        found = _compiled_by_nvrtc(program)  # by which CuPy compiles
    elif shutil.which("nvcc"):
        found = _compiled_by_nvcc(program, tmp_path)
    else:
        pytest.skip("needs cuda-core (pip install 'cuda-core[cu13]'), or nvcc on PATH, to compile CUDA")
    names = {name for file in FILES for name in re.findall(_NAME, cuda.source(file))}
    for architecture, code in found.items():
        assert names and all(name.encode() in code for name in names), architecture


def _compiled_by_nvcc(program: str, folder: Path) -> dict[int, bytes]:
    (folder / "all.cu").write_text(program)
    targets = ",".join(f"sm_{number}" for number in ARCHITECTURES)
    options = [option.replace("--fmad", "-fmad") for option in cuda.OPTIONS]
    options.append("-Werror=all-warnings")
    if not OPTIMISED:
        known = subprocess.run(["nvcc", "--help"], capture_output=True, text=True).stdout  # old ones do not
        options += ["-Xptxas", "-O0", *(["--Ofast-compile=max"] if "--Ofast-compile" in known else [])]
    command = ["nvcc", *options, "--keep", "-fatbin", f"-gencode=arch=compute_80,code=[{targets}]", "all.cu"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {number: next(folder.glob(f"*sm_{number}.cubin")).read_bytes() for number in ARCHITECTURES}


def _compiled_by_nvrtc(program: str) -> dict[int, bytes]:
    from cuda.core import Program, ProgramOptions

    def compiled(number: int) -> bytes:
        speed = None if OPTIMISED else "max"
        options = ProgramOptions(
            std="c++17", fma=False, arch=f"sm_{number}", ofast_compile=speed,
            device_as_default_execution_space=True,  # as CuPy: CUDA 12 takes generic lambdas for the host's
        )  # fmt: skip
        return bytes(Program(program, "c++", options).compile("cubin").code)

    return {number: compiled(number) for number in ARCHITECTURES}
