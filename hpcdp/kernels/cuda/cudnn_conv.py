"""Convolution of CuPy arrays by cuDNN, through its Python frontend; pooling is that of `cuda.kernels`.

``pip install nvidia-cudnn-frontend nvidia-cudnn-cu12`` (or ``cu13``). `cuda.kernels` computes without them, for
operations without an engine, and for arrays with an unsupported alignment. Functions have the names and arguments of
`reference`, with sums in another order. Engines that round to fewer bits than the arrays have (TF32 on tensor
cores), or whose bits differ between runs, are excluded. 16-bit values are multiplied on tensor cores, which accumulate
in float32, and rounded; adding a bias rounds once more.

The engine is the first of cuDNN's heuristics. With ``HPCDP_CUDNN_BENCHMARK=1`` it is the fastest one, measured when a
convolution of new shapes is first computed.

Source: NVIDIA, "cuDNN Frontend", github.com/NVIDIA/cudnn-frontend, `pygraph`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import statistics
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from ...core.arrays import Array, array_namespace, dtype_name, is_half
from ...core.checks import one_of
from .. import cuda
from ..reference import Pair
from . import kernels
from .kernels import average_pool as average_pool
from .kernels import average_pool_gradient as average_pool_gradient
from .kernels import max_pool as max_pool
from .kernels import max_pool_gradient as max_pool_gradient

_TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT", "float64": "DOUBLE"}
_ALIGNED = 16
"""Bytes of alignment that the frontend assumes for tensors."""
_LEFT_OUT = ("DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "NONDETERMINISTIC")
_SELDOM_BEST = "FFT"
"""Also excluded if heuristics choose for float32 and float64.

They count on TF32, and often name FFT next. A step of ResNet-18 on an H200 took 40.4 ms by mode A, 38.7 by B, 31.2 by B
without FFT, and 29 by measuring.
"""

_MOST_TRIED = 16
"""Number of plans that are measured, of some dozens in the order of cuDNN's heuristics."""

_of_thread = threading.local()
"""cuDNN's handles, one per GPU, and plans; neither may be used by two threads at once."""


@functools.cache
def is_there() -> bool:
    """Return whether cuDNN's frontend is installed and starts; warns once why it does not start."""
    if importlib.util.find_spec("cudnn") is None:
        return False
    try:
        importlib.import_module("cudnn").backend_version()  # importing the frontend does not load the library
    except (ImportError, OSError, RuntimeError) as error:
        warnings.warn(f"convolutions on GPUs use im2col, because cuDNN does not start: {error}", stacklevel=2)
        return False
    return True


def conv2d(x: Array, weight: Array, bias: Array | None, out: Array, stride: Pair, padding: Pair, relu: bool) -> None:
    """See `reference.conv2d`."""
    if not _run("conv_fprop", {"image": x, "weight": weight}, out, stride, padding):
        kernels.conv2d(x, weight, bias, out, stride, padding, relu)
    elif bias is not None:
        kernels.add_bias(out, bias, relu)
    elif relu:
        kernels.relu(out, out)


def conv2d_gradients(
    x: Array,
    weight: Array,
    gy: Array,
    out: Array | None,
    into: tuple[Array | None, Array | None, Array | None],
    stride: Pair,
    padding: Pair,
) -> None:
    """See `reference.conv2d_gradients`."""
    dx, dweight, dbias = into
    loss = gy if out is None else array_namespace(gy).empty(gy.shape, dtype=gy.dtype)
    if dbias is not None:
        kernels.bias_gradient(gy, out, loss, dbias)
    elif out is not None:
        kernels.relu_gradient(gy, out, loss)
    if dx is not None and _run("conv_dgrad", {"loss": loss, "filter": weight}, dx, stride, padding):
        dx = None
    if dweight is not None and _run("conv_wgrad", {"image": x, "loss": loss}, dweight, stride, padding):
        dweight = None
    if dx is not None or dweight is not None:
        kernels.conv2d_gradients(x, weight, loss, None, (dx, dweight, None), stride, padding)


def _run(operation: str, operands: dict[str, Array], out: Array, stride: Pair, padding: Pair) -> bool:
    """Let cuDNN compute ``out`` on CuPy's current stream; return whether it can."""
    arrays = (*operands.values(), out)
    if any(x.dtype != out.dtype or x.size == 0 or not x.flags.c_contiguous for x in arrays):
        return False
    kind = dtype_name(out.dtype)
    if kind not in _TYPES or any(x.data.ptr % _ALIGNED for x in arrays):
        return False
    cudnn, cupy = importlib.import_module("cudnn"), array_namespace(out)
    handle = _handle(cudnn, int(out.device.id))
    key = (operation, int(out.device.id), kind, tuple(x.shape for x in arrays), stride, padding)
    plans = vars(_of_thread).setdefault("plans", {})
    cudnn.set_stream(handle=handle, stream=cupy.cuda.get_current_stream().ptr)
    if key not in plans:
        plans[key] = _plan(cudnn, handle, operation, operands, out, stride, padding)
    if plans[key] is None:
        return False
    graph, tensors = plans[key]
    _execute(handle, graph, tensors, arrays)
    return True


def _execute(handle: Any, graph: Any, tensors: list[Any], arrays: tuple[Array, ...]) -> None:
    """Execute the plan of ``graph`` that was built last."""
    cupy = array_namespace(*arrays)
    workspace = cupy.empty(max(1, graph.get_workspace_size()), dtype=cupy.uint8)
    at = {tensor: int(x.data.ptr) for tensor, x in zip(tensors, arrays, strict=True)}
    graph.execute(at, int(workspace.data.ptr), handle=handle)


def _handle(cudnn: Any, device: int) -> Any:
    """Return this thread's handle for the current GPU ``device``; a number only in early frontend releases."""
    handles = vars(_of_thread).setdefault("handles", {})
    if device not in handles:
        handles[device] = cudnn.create_handle()
    return handles[device]


def _measures() -> bool:
    """Return whether ``HPCDP_CUDNN_BENCHMARK`` selects engines by measurement; their bits may differ between runs."""
    setting = os.environ.get("HPCDP_CUDNN_BENCHMARK") or "0"
    return one_of("convolution", "HPCDP_CUDNN_BENCHMARK", setting, ("0", "1")) == "1"


def _plan(
    cudnn: Any, handle: Any, operation: str, operands: dict[str, Array], out: Array, stride: Pair, padding: Pair
) -> tuple[Any, list[Any]] | None:
    """Return a built graph of one operation, and its tensors, ``operands`` and result; None without an engine."""
    kind = getattr(cudnn.data_type, _TYPES[dtype_name(out.dtype)])
    measures = _measures()
    left_out: tuple[str, ...] = _LEFT_OUT
    wide, mode = cudnn.data_type.FLOAT, cudnn.heur_mode.A
    if not is_half(out):
        wide, left_out = kind, ("TENSOR_CORE", *left_out)
        if not measures:
            mode, left_out = cudnn.heur_mode.B, (_SELDOM_BEST, *left_out)
    try:
        graph = cudnn.pygraph(io_data_type=kind, intermediate_data_type=wide, compute_data_type=wide, handle=handle)
        tensors = {
            name: graph.tensor(name=name, dim=list(x.shape), stride=_strides(x), data_type=kind)
            for name, x in operands.items()
        }
        steps = {"padding": list(padding), "stride": list(stride), "dilation": [1, 1]}
        result = getattr(graph, operation)(**tensors, **steps)
        result.set_output(True).set_data_type(kind).set_dim(list(out.shape)).set_stride(_strides(out))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([mode, cudnn.heur_mode.FALLBACK])
        graph.deselect_numeric_notes([getattr(cudnn.numerical_note, name) for name in left_out])
        graph.check_support()
        all_tensors = [*tensors.values(), result]
        if measures:
            _build_fastest(cudnn, graph, lambda: _execute(handle, graph, all_tensors, (*operands.values(), out)))
        else:
            graph.build_plans()
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError):
        return None
    return graph, all_tensors


def _build_fastest(cudnn: Any, graph: Any, execute: Callable[[], None]) -> None:
    """Build the plan with which ``execute`` is fastest, of the first supported ones."""
    measured: dict[int, float] = {}
    for index in range(graph.get_execution_plan_count()):
        # a plan may be excluded, unsupported by this GPU, or out of memory for its workspace
        with contextlib.suppress(cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError, MemoryError):
            graph.build_plan_at_index(index)
            measured[index] = milliseconds(execute)
        if len(measured) == _MOST_TRIED:
            break
    if measured:
        graph.build_plan_at_index(min(measured, key=measured.__getitem__))
    else:
        graph.build_plans()


def _strides(x: Array) -> list[int]:
    """Return the strides in elements."""
    return [stride // x.dtype.itemsize for stride in x.strides]


_RUNS = 3
_NAP_TICKS = 600_000
"""Ticks of the GPU's clock, some 0.3 ms."""


def milliseconds(work: Callable[[], None]) -> float:
    """Return the median time of a few runs of ``work`` on the current stream, after a first one; waits for them.

    The stream naps before each, so that all of ``work`` is enqueued when it begins.
    """
    import cupy

    work()
    times = []
    for _ in range(_RUNS):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        cuda.launch("times", "nap", 1, np.int64(_NAP_TICKS))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end))
    return statistics.median(times)
