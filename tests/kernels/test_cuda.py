"""How CUDA kernels are chosen, launched and refused; where there is no GPU, they run on this processor."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import standin
from raises import raises

from hpcdp import kernels, optim
from hpcdp.core.files import data_folder
from hpcdp.errors import UnsupportedError
from hpcdp.kernels import cuda, reference
from hpcdp.kernels.cuda import kernels as cuda_kernels

FOLDER = Path(cuda.__file__).parent
SOURCES = data_folder("kernels")
FAMILIES = ("networks", "convolution", "gradients")
ON_GPUS_ALONE = {"function": "all_squares", "parameter": "scale"}
"""A function, and a parameter of others, that spare the host a wait, and exist for CUDA only."""


def test_kernels_are_chosen_by_the_array(cupy: ModuleType) -> None:
    host = np.ones(3, np.float32)
    chosen = [kernels.kernels_for("gradients", x) for x in (host, standin.asarray(host))]
    assert chosen == [kernels.load("gradients"), reference]
    assert kernels.kernels_for("gradients", cupy.asarray(host)) is cuda_kernels
    assert kernels.kernels_for("gradients", host, plain_on_host=True) is reference


def test_numpy_does_not_import_cupy() -> None:
    program = "import sys, numpy, hpcdp.kernels.cuda.kernels, hpcdp.optim as o; x = numpy.ones(3); "
    program += "o.SGD(lr=0.1).update(x, x.copy(), {}, step=1); assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_functions_are_those_of_the_specification(name: str) -> None:
    """CUDA has every function of the specification that Numba has, with the same parameters."""
    file = Path(kernels.load(name).__file__ or "")
    needed = {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
    ours, theirs = (
        {
            function: [parameter for parameter in parameters if parameter != ON_GPUS_ALONE["parameter"]]
            for function, parameters in parameters_of(module).items()
            if function in needed
        }
        for module in (cuda_kernels, reference)
    )
    assert ours and ours == theirs


def test_cuda_has_no_functions_beside_those_of_the_specification() -> None:
    ours, theirs = parameters_of(cuda_kernels), parameters_of(reference)
    assert ours.keys() - theirs.keys() == {ON_GPUS_ALONE["function"]}
    for function in ours.keys() & theirs.keys():
        extra = {ON_GPUS_ALONE["parameter"]} - set(theirs[function])
        assert [name for name in ours[function] if name not in extra] == theirs[function]


def parameters_of(module: ModuleType) -> dict[str, list[str]]:
    """Parameters of a module's public functions; a CUDA module may import some from the specification."""
    homes = (module.__name__, reference.__name__)
    return {
        name: list(inspect.signature(function).parameters)
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ in homes and not name.startswith("_")
    }


def test_every_family_has_numba_kernels_and_every_source_is_launched() -> None:
    modules = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
    assert all(kernels.load(name) for name in FAMILIES)
    sources = {path.stem for path in SOURCES.glob("*.cu")}
    named = {name for text in modules.values() for name in re.findall(r'"(\w+)"', text)}
    assert sources <= named, sources - named


def test_an_optimizer_updates_by_one_launch(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    launch = cuda.launch
    monkeypatch.setattr(cuda, "launch", lambda *args: (launched.append(args[1]), launch(*args)))
    rng = np.random.default_rng(5)
    param, grad = rng.standard_normal((2, 37), np.float32)
    rule = optim.AdamW(lr=0.1, weight_decay=0.01)
    on_host, on_device = (param.copy(), rule.init_state(param)), cupy.asarray(param)
    state = rule.init_state(on_device)
    for step in (1, 2):
        rule.update(on_host[0], grad, on_host[1], step=step, scale=0.5)
        rule.update(on_device, cupy.asarray(grad), state, step=step, scale=0.5)
    assert launched == ["adam_f32", "adam_f32"]
    np.testing.assert_array_equal(on_device.to_host(), on_host[0])
    np.testing.assert_array_equal(state["v"].to_host(), on_host[1]["v"])


def test_arrays_that_kernels_cannot_read_are_refused(cupy: ModuleType) -> None:
    x = cupy.asarray(np.ones(8, np.float32))
    with raises(UnsupportedError, operation="sgd", where="dtype", expected=["float32", "float64"], got="float16"):
        cuda_kernels.sgd(x.astype(np.float16), x.astype(np.float16), (0.1, 0.0, 1.0))
    with raises(UnsupportedError, operation="sgd", expected=[4, "float32"], got=(8,)):
        cuda_kernels.sgd(x[:4], x[::2], (0.1, 0.0, 1.0))
    with raises(UnsupportedError, operation="sgd", expected=[8, "float32"], got=[7, "float32"]):
        cuda_kernels.sgd(x, x[:7], (0.1, 0.0, 1.0))
    with raises(UnsupportedError, operation="sgd", got=[8, "float64"]):
        cuda_kernels.sgd(x, x.astype(np.float64), (0.1, 0.0, 1.0))
    with raises(UnsupportedError, operation="to_float16_f32", where="dtype", expected="uint16", got="int32"):
        cuda_kernels.to_float16(x, x.astype(np.int32))


def test_a_source_is_complete_and_asks_for_no_header() -> None:
    for path in SOURCES.glob("*.cu"):
        text = cuda.source(path.stem)
        assert "this_thread()" in text
        assert "#include" not in text, "CuPy would not see that a file has changed"


def test_numbers_that_two_files_say_agree() -> None:
    assert f"THREADS = {cuda.THREADS}, WARP = {cuda.WARP} " in cuda.source("update")
    assert f"PIECES = {cuda_kernels._PIECES} " in cuda.source("norms")
    assert f"KEPT = {cuda_kernels._KEPT} " in cuda.source("cross_entropy")
    assert f"COLUMNS = {cuda_kernels._COLUMNS} " in cuda.source("epilogue")
    assert f"MAX_ROWS = {cuda_kernels.MAX_ROWS} " in cuda.source("reduce")
    assert f"BLOCK = {reference.BLOCK} }};" in cuda.source("compress")
    constants = f"SHARE = {reference.SHARE}, LARGEST = {reference._LARGEST:.7e};".replace("e+", "e")
    assert constants in cuda.source("compress")
    assert f"DIGIT_BITS = {cuda_kernels._DIGIT_BITS}, " in cuda.source("compress")
    names = [name for name in vars(reference) if name in ("SUM", "PROD", "MIN", "MAX", "MEAN")]
    assert f"enum {{ {', '.join(names)} }};" in cuda.source("reduce")


SHIM = """
extern "C" __global__ void ranks(int* out, int given) {
    __shared__ int seen[256];
    seen[threadIdx.x] = given;
    __syncthreads();
    const unsigned odd = __ballot_sync(~0u, threadIdx.x % 2);
    out[blockIdx.x * blockDim.x + threadIdx.x] = seen[(threadIdx.x + 1) % blockDim.x] + int(odd);
}
extern "C" __global__ void leaves(int* out, int given) {
    if (threadIdx.x == given) return;
    __syncthreads();
}
extern "C" __global__ void lacks_a_barrier(int* out, int given) {
    __shared__ int seen[256];
    seen[threadIdx.x] = given;
    out[threadIdx.x] = threadIdx.x ? seen[threadIdx.x - 1] : given;
}
struct alignas(16) Four {
    int at[4];
};
extern "C" __global__ void copies_four(const int* from, int* to) {
    *reinterpret_cast<Four*>(to) = *reinterpret_cast<const Four*>(from);
}
"""


def test_the_host_runs_blocks_as_a_gpu_does(on_host: ModuleType) -> None:
    module = on_host.RawModule(code=SHIM, options=cuda.OPTIONS)
    out = on_host.asarray(np.zeros(2 * 40, np.int32))
    module.get_function("ranks")((2,), (40,), (out, np.int32(1000)))
    votes = np.where(np.arange(40) < 32, 0xAAAAAAAA, 0xAA).astype(np.uint32).view(np.int32)
    np.testing.assert_array_equal(out.to_host(), np.tile(1000 + votes, 2))
    with pytest.raises(RuntimeError, match="barrier that others never reach"):
        module.get_function("leaves")((1,), (40,), (out, np.int32(3)))


def test_a_missing_barrier_is_seen(on_host: ModuleType) -> None:
    kernel = on_host.RawModule(code=SHIM, options=cuda.OPTIONS).get_function("lacks_a_barrier")
    alike = []
    for given in (1, 2):
        out = on_host.asarray(np.zeros(40, np.int32))
        kernel((1,), (40,), (out, np.int32(given)))
        alike.append(bool((out.to_host() == given).all()))
    assert sorted(alike) == [False, True]


def test_the_host_refuses_misaligned_packs_as_a_gpu_does(on_host: ModuleType) -> None:
    copies = on_host.RawModule(code=SHIM, options=cuda.OPTIONS).get_function("copies_four")
    x, out = on_host.asarray(np.arange(8, dtype=np.int32)), on_host.asarray(np.zeros(8, np.int32))
    copies((1,), (1,), (x[4:], out[:4]))
    np.testing.assert_array_equal(out.to_host(), [4, 5, 6, 7, 0, 0, 0, 0])
    with pytest.raises(RuntimeError, match="misaligned"):
        copies((1,), (1,), (x[:4], out[1:]))


def test_the_host_refuses_what_a_gpu_would_misread(on_host: ModuleType) -> None:
    kernel = on_host.RawModule(code=SHIM, options=cuda.OPTIONS).get_function("ranks")
    out = on_host.asarray(np.zeros(1, np.int32))
    for args in ((out, np.int64(1)), (out, np.float32(1)), (out, 1), (np.int64(1), np.int32(1)), (out,)):
        with pytest.raises(AssertionError):
            kernel((1,), (1,), args)


def test_kernels_use_no_float_atomics_and_no_wait() -> None:
    """Those of top-k and of rows count: `cuda_on_host.h` has none but of integers. Who measures waits."""
    for path in [*SOURCES.iterdir(), *FOLDER.glob("*.py")]:
        assert path.name == "cudnn_conv.py" or "synchronize" not in path.read_text(), path
        assert path.name in ("top_k.cuh", "rows.cu") or "atomicAdd" not in path.read_text(), path
