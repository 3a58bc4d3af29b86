"""The CUDA sources compile without a warning for the GPUs that hpcdp supports; needs nvcc or cuda-core, but no GPU.

`make check` compiles them; `make test` leaves it out, because that takes 40 s of a core.
They are compiled as one program, each in a namespace of its own, because most of a compiler's time goes into its start.
Sources that have compiled are compiled again only when they, the options or the compiler change.
"""

import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcdp.core.files import data_folder
from hpcdp.kernels import cuda

ARCHITECTURES = (80, 90, 100)
"""A100; H100 and H200; B200."""

compiles = pytest.mark.skipif(not os.environ.get("HPCDP_TEST_CUDA_SOURCES"), reason="make check compiles CUDA sources")
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


@compiles
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_compile_without_a_warning(architecture: int, tmp_path: Path) -> None:
    compile_program, version = _compiler()
    program = "".join(_alone(file) for file in FILES)
    key = repr((program, cuda.OPTIONS, OPTIMIZED, version, Path(__file__).read_text()))
    compiled = Path(sys.prefix, "cuda-sources", f"sm_{architecture}-{hashlib.sha256(key.encode()).hexdigest()}")
    if compiled.exists():
        return
    code = compile_program(program, architecture, tmp_path)
    names = {name for file in FILES for name in re.findall(_NAME, cuda.source(file))}
    assert names and all(name.encode() in code for name in names)
    compiled.parent.mkdir(exist_ok=True)
    compiled.touch()


@compiles
def test_a_warning_is_an_error(tmp_path: Path) -> None:
    compile_program, _ = _compiler()
    program = _alone("times")
    assert compile_program(program, 80, tmp_path)
    with pytest.raises(AssertionError, match="never_used"):
        compile_program(program + "__global__ void warned() { int never_used; }\n", 80, tmp_path)


def _compiler() -> tuple[Callable[[str, int, Path], bytes], str]:
    """Return a function that compiles a program for an architecture, with a folder for its files, and its version."""
    if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core"):
        from cuda.bindings import nvrtc

        return _compiled_by_nvrtc, str(nvrtc.nvrtcVersion())  # by which CuPy compiles
    if shutil.which("nvcc"):
        return _compiled_by_nvcc, subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    pytest.skip("needs cuda-core (pip install 'cuda-core[cu13]'), or nvcc on PATH, to compile CUDA")


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


def _compiled_by_nvrtc(program: str, architecture: int, _: Path) -> bytes:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        std="c++17", fma=False, arch=f"sm_{architecture}", ofast_compile=None if OPTIMIZED else "max",
        device_as_default_execution_space=True,  # as CuPy: CUDA 12 takes generic lambdas for the host's
    )  # fmt: skip
    log = io.StringIO()
    code = Program(program, "c++", options).compile("cubin", logs=log).code
    assert not log.getvalue(), log.getvalue()
    return bytes(code)
