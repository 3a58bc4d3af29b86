"""Convolutions by cuDNN: its frontend's place is taken by one that computes in host memory, at the addresses given."""

import ctypes
import importlib
import sys
import types

import numpy as np
import pytest
from gpu_on_host import cupy_module
from pairs import pairs
from raises import raises

from hpcdp import kernels
from hpcdp.core.arrays import dtype_of, is_half
from hpcdp.errors import ConfigError
from hpcdp.kernels import reference
from hpcdp.kernels.cuda import cudnn_conv
from hpcdp.kernels.cuda import kernels as cuda_kernels
from hpcdp.kernels.reference import output_size
from hpcdp.nn import functional

CASES = [((1, 1), (0, 0)), ((2, 1), (1, 2)), ((1, 2), (2, 0))]
DTYPES = {"HALF": "float16", "BFLOAT16": "bfloat16", "FLOAT": "float32", "DOUBLE": "float64"}


ERRORS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5, "float64": 1e-12}
"""Of the largest element."""


def wide(x):
    return x.astype("f4") if is_half(x) else x


class NotSupported(Exception):
    pass


class Handle:
    """cuDNN's, which early releases of the frontend give as a number; later ones refuse numbers."""


HANDLE = Handle()


class Tensor:
    def __init__(self, dim=None, stride=None, data_type=None):
        self.dim, self.stride, self.data_type, self.output = dim, stride, data_type, False

    def set_output(self, is_output):
        self.output = is_output
        return self

    def set_data_type(self, data_type):
        self.data_type = data_type
        return self

    def set_dim(self, dim):
        assert all(type(each) is int for each in dim)
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def at(self, address):
        dtype = dtype_of(DTYPES[self.data_type])
        assert self.stride == [each // dtype.itemsize for each in np.empty(self.dim, dtype).strides]
        count = int(np.prod(self.dim))
        held = np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)
        return held.reshape(self.dim)


class Graph:
    """Calls in the order that cuDNN's frontend wants them in; what is left out then counts."""

    def __init__(self, made, *, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert intermediate_data_type == compute_data_type and handle is HANDLE
        assert compute_data_type == {"HALF": "FLOAT", "BFLOAT16": "FLOAT"}.get(io_data_type, io_data_type)
        self.made, self.done, self.left_out, self.plan = made, [], set(), None
        made.graphs.append(self)

    def tensor(self, *, name, dim, stride, data_type):
        return Tensor(dim, stride, data_type)

    def conv_fprop(self, *, image, weight, padding, stride, dilation):
        return self._operation("conv_fprop", (image, weight), padding, stride, dilation)

    def conv_dgrad(self, *, loss, filter, padding, stride, dilation):
        return self._operation("conv_dgrad", (loss, filter), padding, stride, dilation)

    def conv_wgrad(self, *, image, loss, padding, stride, dilation):
        return self._operation("conv_wgrad", (image, loss), padding, stride, dilation)

    def _operation(self, name, given, padding, stride, dilation):
        assert dilation == [1, 1]
        self.name, self.given, self.steps, self.out = name, given, (tuple(stride), tuple(padding)), Tensor()
        return self.out

    def validate(self):
        assert self.out.output
        self.done.append("validate")

    def build_operation_graph(self):
        self.done.append("build")
        if self.name in self.made.refused:
            raise NotSupported(self.name)

    def create_execution_plans(self, modes):
        first, last = modes
        assert last == "FALLBACK"
        self.mode = first
        self.done.append("plans")

    def deselect_numeric_notes(self, notes):
        assert self.done[-1] == "plans", "there is nothing to leave out yet"
        self.left_out = set(notes)

    def check_support(self):
        self.done.append("check")

    def build_plans(self):
        assert self.done == ["validate", "build", "plans", "check"]
        self.done.append("built")

    def get_execution_plan_count(self):
        assert self.done[-1] != "plans", "what is left out would count, too"
        return len(self.made.plans)

    def build_plan_at_index(self, index):
        plan = self.made.plans[index]
        if isinstance(plan, Exception):
            raise plan
        self.plan = plan
        self.done.append("built")

    def get_workspace_size(self):
        return 0

    def execute(self, at, workspace, handle):
        assert self.done[-1] == "built" and handle is HANDLE and type(workspace) is int
        assert self.made.stream is not None
        self.made.executed.append(self.name)
        if self.plan is not None:
            self.made.took.append(self.plan)
            self.made.gpus.take_ms(self.plan)

        def run():
            first, second = (wide(each.at(at[each])) for each in self.given)
            into = self.out.at(at[self.out])
            out = wide(into)
            if self.name == "conv_fprop":
                reference.conv2d(first, second, None, out, *self.steps, False)
            elif self.name == "conv_dgrad":
                reference.conv2d_gradients(np.zeros_like(out), second, first, None, (out, None, None), *self.steps)
            else:
                reference.conv2d_gradients(first, np.zeros_like(out), second, None, (None, out, None), *self.steps)
            into[...] = out

        cupy_module.give(run)


@pytest.fixture
def cudnn(gpus_on_host):
    made = types.ModuleType("cudnn")
    made.__spec__ = importlib.machinery.ModuleSpec("cudnn", None)
    made.graphs, made.executed, made.refused, made.stream, made.gpus = [], [], set(), None, gpus_on_host
    made.plans, made.took = [], []  # how long each takes, in ms, or why it cannot be built; those that were executed
    made.data_type = types.SimpleNamespace(**{name: name for name in DTYPES})
    made.heur_mode = types.SimpleNamespace(A="A", B="B", FALLBACK="FALLBACK")
    notes = "TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "NONDETERMINISTIC", "WINOGRAD", "FFT"
    made.numerical_note = types.SimpleNamespace(**{name: name for name in notes})
    made.cudnnGraphNotSupportedError = NotSupported
    made.backend_version = lambda: 92801
    made.create_handle = lambda: HANDLE

    def set_stream(*, handle, stream):
        assert handle is HANDLE
        made.stream = stream

    made.set_stream = set_stream
    made.pygraph = lambda **options: Graph(made, **options)
    vars(cudnn_conv._of_thread).clear()
    cudnn_conv.is_there.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cudnn", made)
        yield made
    vars(cudnn_conv._of_thread).clear()
    cudnn_conv.is_there.cache_clear()


def arrays(dtype, stride, padding):
    rng = np.random.default_rng(3)
    kind = dtype_of(dtype)
    x, weight, bias = (rng.standard_normal(shape).astype(kind) for shape in ((2, 3, 7, 8), (4, 3, 3, 2), (4,)))
    size = [output_size(*each) for each in zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)]
    return x, weight, bias, rng.standard_normal((2, 4, *size)).astype(kind)


def to_gpu(x):
    return None if x is None else importlib.import_module("cupy").asarray(x)


@pytest.mark.parametrize(
    ("dtype", "relu", "case", "refused"),
    pairs(DTYPES.values(), [False, True], CASES, [(), ("conv_dgrad",), ("conv_wgrad", "conv_fprop")]),
)
def test_it_is_the_specification_and_what_cudnn_refuses_goes_by_im2col(cudnn, dtype, relu, case, refused):
    def close(ours, theirs):
        assert ours.dtype == x.dtype
        np.testing.assert_allclose(wide(ours.to_host()), theirs, rtol=0, atol=ERRORS[dtype] * abs(theirs).max())

    cudnn.refused, (stride, padding) = set(refused), case
    x, weight, bias, gy = arrays(dtype, stride, padding)
    out = wide(np.full_like(gy, 7))
    for added in (bias, None):
        there = to_gpu(np.full_like(gy, 7))
        cudnn_conv.conv2d(to_gpu(x), to_gpu(weight), to_gpu(added), there, stride, padding, relu)
        reference.conv2d(wide(x), wide(weight), None if added is None else wide(added), out, stride, padding, relu)
        close(there, out)
    out = out.astype(x.dtype) if relu else None
    for wanted in ((x, weight, bias), (None, weight, None), (x, None, bias)):
        ours = [None if each is None else to_gpu(np.full_like(each, 7)) for each in wanted]
        theirs = [None if each is None else wide(np.full_like(each, 7)) for each in wanted]
        cudnn_conv.conv2d_gradients(*map(to_gpu, (x, weight, gy, out)), tuple(ours), stride, padding)
        given = (None if each is None else wide(each) for each in (x, weight, gy, out))
        reference.conv2d_gradients(*given, tuple(theirs), stride, padding)
        for mine, each in zip(ours, theirs, strict=True):
            assert (mine is None) == (each is None)
            if mine is not None:
                close(mine, each)
    assert set(cudnn.executed) == {"conv_fprop", "conv_dgrad", "conv_wgrad"} - set(refused)


def test_a_plan_is_built_once_for_arrays_of_one_kind(cudnn):
    x, weight, _, gy = arrays("f4", (1, 1), (0, 0))
    for _ in range(3):
        cudnn_conv.conv2d(to_gpu(x), to_gpu(weight), None, to_gpu(gy), (1, 1), (0, 0), False)
    assert len(cudnn.graphs) == 1 and len(cudnn.executed) == 3
    cudnn_conv.conv2d(to_gpu(x[:1]), to_gpu(weight), None, to_gpu(gy[:1]), (1, 1), (0, 0), False)
    assert len(cudnn.graphs) == 2


@pytest.mark.parametrize(
    ("dtype", "measures", "mode", "more"),
    [("f4", "0", "B", {"TENSOR_CORE", "FFT"}), ("f4", "1", "A", {"TENSOR_CORE"}), ("f2", "0", "A", set())],
)
def test_what_rounds_more_is_left_out_and_what_is_seldom_best(cudnn, monkeypatch, dtype, measures, mode, more):
    monkeypatch.setenv("HPCDP_CUDNN_BENCHMARK", measures)
    x, weight, _, gy = arrays(dtype, (1, 1), (0, 0))
    cudnn_conv.conv2d(to_gpu(x), to_gpu(weight), None, to_gpu(gy), (1, 1), (0, 0), False)
    (graph,) = cudnn.graphs
    assert graph.mode == mode
    assert graph.left_out == {"DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "NONDETERMINISTIC", *more}


def test_the_fastest_plan_is_taken_where_that_is_asked_for(cudnn, monkeypatch):
    """Of those that can be built; measured once, and only then."""
    monkeypatch.setenv("HPCDP_CUDNN_BENCHMARK", "1")
    cudnn.plans = [ValueError("left out"), 3.0, NotSupported(), 0.5, 2.0]
    x, weight, _, gy = arrays("f4", (1, 1), (0, 0))
    there = to_gpu(gy)
    for ran in (3 * (1 + cudnn_conv._RUNS) + 1, 1):
        cudnn_conv.conv2d(to_gpu(x), to_gpu(weight), None, there, (1, 1), (0, 0), False)
        assert len(cudnn.took) == ran and cudnn.took[-1] == 0.5
        cudnn.took.clear()
    reference.conv2d(x, weight, None, gy, (1, 1), (0, 0), False)
    np.testing.assert_allclose(there.to_host(), gy, rtol=1e-4, atol=1e-4)
    monkeypatch.setenv("HPCDP_CUDNN_BENCHMARK", "0")
    cudnn_conv.conv2d(to_gpu(x[:1]), to_gpu(weight), None, to_gpu(gy[:1]), (1, 1), (0, 0), False)
    assert not cudnn.took


def test_a_setting_that_is_none_is_refused(cudnn, monkeypatch):
    monkeypatch.setenv("HPCDP_CUDNN_BENCHMARK", "no")
    x, weight, _, gy = arrays("f4", (1, 1), (0, 0))
    with raises(ConfigError, operation="convolution", where="HPCDP_CUDNN_BENCHMARK", expected=[0, 1], got="no"):
        cudnn_conv.conv2d(to_gpu(x), to_gpu(weight), None, to_gpu(gy), (1, 1), (0, 0), False)


def test_no_more_plans_are_tried_than_the_first(cudnn, monkeypatch):
    monkeypatch.setenv("HPCDP_CUDNN_BENCHMARK", "1")
    cudnn.plans = [NotSupported(), *[1.0] * cudnn_conv._MOST_TRIED, 0.5]
    x, weight, _, gy = arrays("f4", (1, 1), (0, 0))
    cudnn_conv.conv2d(to_gpu(x), to_gpu(weight), None, to_gpu(gy), (1, 1), (0, 0), False)
    assert set(cudnn.took) == {1.0}


def test_plans_of_which_none_can_be_measured_are_chosen_by_heuristics(cudnn, monkeypatch):
    monkeypatch.setenv("HPCDP_CUDNN_BENCHMARK", "1")
    cudnn.plans = [NotSupported(), MemoryError()]
    x, weight, _, gy = arrays("f4", (1, 1), (0, 0))
    cudnn_conv.conv2d(to_gpu(x), to_gpu(weight), None, to_gpu(gy), (1, 1), (0, 0), False)
    assert cudnn.executed == ["conv_fprop"] and not cudnn.took


def test_what_the_host_takes_to_launch_is_not_measured(gpus_on_host):
    """The first run is not either, for which kernels are loaded."""
    took = iter([9.0, 2.0, 1.0, 7.0])
    assert cudnn_conv.milliseconds(lambda: gpus_on_host.take_ms(next(took))) == 2.0
    assert gpus_on_host.log.count("kernel") == 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensor_cores_multiply_what_has_16_bits_and_add_up_in_float32(cudnn, dtype):
    x, weight, _, gy = arrays(dtype, (1, 1), (0, 0))
    cudnn_conv.conv2d(to_gpu(x), to_gpu(weight), None, to_gpu(gy), (1, 1), (0, 0), False)
    assert cudnn.graphs[0].left_out == {"DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "NONDETERMINISTIC"}
    assert kernels.kernels_for("convolution", to_gpu(x)) is cudnn_conv
    functional.conv2d(to_gpu(x), to_gpu(weight))
    assert cudnn.executed == ["conv_fprop"] * 2


def test_a_frontend_without_the_library_is_none(cudnn):
    """`import cudnn` works then; what asks the library for something fails."""

    def missing():
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    cudnn.backend_version = missing
    with pytest.warns(UserWarning, match="use im2col, because cuDNN does not start: Unable to find symbol"):
        assert kernels.kernels_for("convolution", to_gpu(np.zeros(3))) is cuda_kernels


def test_a_batch_of_nothing_does_not_ask_cudnn(cudnn):
    x, weight, _, gy = arrays("f4", (1, 1), (0, 0))
    cudnn_conv.conv2d(to_gpu(x[:0]), to_gpu(weight), None, to_gpu(gy[:0]), (1, 1), (0, 0), False)
    assert not cudnn.graphs


@pytest.mark.parametrize("moved", range(3))
def test_memory_that_does_not_begin_at_16_bytes_goes_by_im2col(cudnn, moved):
    """Where tensors begin is not said to the frontend, which takes 16 bytes then."""
    x, weight, _, gy = arrays("f4", (1, 1), (0, 0))
    there = []
    for number, each in enumerate((x, weight, gy)):
        offset = int(number == moved)
        there.append(to_gpu(np.append(np.zeros(offset, "f4"), each))[offset:].reshape(each.shape))
    cudnn_conv.conv2d(*there[:2], None, there[2], (1, 1), (0, 0), False)
    reference.conv2d(x, weight, None, gy, (1, 1), (0, 0), False)
    np.testing.assert_allclose(there[2].to_host(), gy, rtol=1e-4, atol=1e-4)
    assert not cudnn.graphs


def test_networks_take_it_where_it_is_installed(cudnn):
    x, weight, _, _ = arrays("f4", (1, 1), (0, 0))
    assert kernels.kernels_for("convolution", to_gpu(x)) is cudnn_conv
    functional.conv2d(to_gpu(x), to_gpu(weight))
    assert cudnn.executed == ["conv_fprop"]


def test_without_it_convolutions_go_by_im2col(cudnn, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cudnn_conv.is_there.cache_clear()
    assert kernels.kernels_for("convolution", to_gpu(np.zeros(3))) is cuda_kernels


def test_a_stand_in_for_cupy_has_none_where_it_is_installed(cudnn):
    assert cudnn_conv.is_there()
    with cupy_module.instead():
        assert not cudnn_conv.is_there()
    assert cudnn_conv.is_there()


def test_one_that_does_not_start_is_told_once(cudnn, monkeypatch):
    load = importlib.import_module

    def refuses(name, *more):
        if name == "cudnn":
            raise RuntimeError("no libcudnn.so.9")
        return load(name, *more)

    monkeypatch.setattr("importlib.import_module", refuses)
    with pytest.warns(UserWarning, match=r"use im2col, because cuDNN does not start: no libcudnn\.so\.9") as told:
        for _ in range(2):
            assert kernels.kernels_for("convolution", to_gpu(np.zeros(3))) is cuda_kernels
    assert len(told) == 1
