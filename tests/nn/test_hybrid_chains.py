"""Chains of elementwise operators in one pass over memory: the same bits, forward and backward, and fewer calls."""

import copy
import itertools
import os

import numpy as np
import pytest

from hpcdp import autograd, kernels, nn
from hpcdp.autograd import Tensor
from hpcdp.nn.jit import executor, fusion
from hpcdp.nn.jit.fusion import BACKWARD, FORWARD, FusedProgram, _lies_in_order
from hpcdp.nn.layers import gelu

F = nn.functional
ONE = {
    "negative": lambda x: -x, "abs": abs, "sqrt": lambda x: abs(x).sqrt(), "exp": lambda x: (-abs(x)).exp(),
    "log": lambda x: (abs(x) + 0.5).log(), "tanh": lambda x: x.tanh(), "sigmoid": lambda x: x.sigmoid(),
    "relu": F.relu, "gelu": gelu,
}  # fmt: skip
TWO = {
    "add": lambda x, y: x + y, "subtract": lambda x, y: x - y, "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / y, "maximum": autograd.maximum, "minimum": autograd.minimum,
}  # fmt: skip
THOROUGH = os.environ.get("HPCDP_TEST_THOROUGH")
OPERATORS = {**{name: lambda x, y, f=f: f(x) for name, f in ONE.items()}, **TWO}
NAMES = list(OPERATORS)


def arrays(*shape, seed=0, dtype=np.float32):
    found = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    return np.where(np.abs(found) < 0.3, np.array(0.5, dtype), found)  # some that are equal, as ties are


class Chain(nn.Module):
    def __init__(self, function, **attributes):
        self.__dict__["function"] = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def pair(net):
    plain = copy.deepcopy(net)
    net.hybridize()
    return net, plain


def same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_array_equal(np.atleast_1d(a).view(np.uint8), np.atleast_1d(b).view(np.uint8))


def run(net, inputs, head=None):
    """Results, and gradients of inputs and parameters."""
    given = [Tensor(each) for each in inputs]
    for each in given:
        each.attach_grad()
    with autograd.record():
        found = net(*given)
        found = list(found) if isinstance(found, tuple) else [found]
        heads = found if head is None else [head(each) for each in found]
    autograd.backward(heads, [np.cos(np.arange(each.size, dtype=each.dtype)).reshape(each.shape) for each in heads])
    return [*(each.data for each in found), *(each.grad for each in given), *(each.grad for each in net.parameters())]


def in_both(net, plain, inputs_of, head=None, times=4):
    for seed in range(times):
        inputs = inputs_of(seed)
        same(run(net, inputs, head), run(plain, inputs, head))
        found, expected = net(*inputs), plain(*inputs)
        if not isinstance(found, tuple):
            found, expected = (found,), (expected,)
        same([each.data for each in found], [each.data for each in expected])


def kernel_calls(plan):
    """How often a replay calls the kernel of chains, or a program that does."""
    runs = {each.entry_point for each in kernels.load("networks").run_chain.overloads.values()} | {FusedProgram.run}
    return sum(getattr(function, "__func__", function) in runs for step in plan._steps for function, _ in step.calls)


def test_every_operator_of_chains_is_tested():
    assert set(OPERATORS) == set(FORWARD) == set(BACKWARD)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("first", "second"), list(itertools.product(OPERATORS, OPERATORS)))
def test_two_operators_and_two_more_are_the_same_bits(first, second, plans):
    def chain(self, x, y):
        return OPERATORS[second](OPERATORS[first](x, y), x) * y + x

    both = (np.float32, np.float64)  # each operator has both, each pair of operators one
    for dtype in both if THOROUGH else (both[(NAMES.index(first) + NAMES.index(second)) % 2],):
        net, plain = pair(Chain(chain))
        in_both(net, plain, lambda seed, dtype=dtype: [arrays(3, 17, seed=2 * seed + i, dtype=dtype) for i in (0, 1)])
    assert all(kernel_calls(plan) for plan in plans)


def long_chain(self, x, y):
    a = x * 0.5 + y
    b = autograd.maximum(a - self.row, -1.5)
    c = gelu(b * self.scalar) + abs(b) + 0.25
    d = (c.sqrt() - a) / (c + 1)
    e = (d.sigmoid() * d).tanh() - (-(d * d)).exp()
    return F.relu(-e) * b, autograd.minimum(e, y)


SHAPES = [(1,), (5,), (1023,), (1025,), (9, 3), (2, 3, 341), (3, 1024), (5, 2500), (3, 9000), (7, 11, 301), (3, 40000)]


@pytest.mark.each_value
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_long_chains_of_every_size_are_the_same_bits(shape, dtype, plans):
    row, scalar = Tensor(arrays(shape[-1], seed=9, dtype=dtype)), Tensor(np.array(1.5, dtype))
    net, plain = pair(Chain(long_chain, row=row, scalar=scalar))
    in_both(net, plain, lambda seed: [arrays(*shape, seed=2 * seed + i, dtype=dtype) for i in (0, 1)])
    assert len(plans) == 2 and all(kernel_calls(plan) for plan in plans)


def test_rows_and_numbers_are_read_anew_in_every_call():
    row, scalar = Tensor(arrays(7, seed=9)), Tensor(np.array(1.5, np.float32))
    net, plain = pair(Chain(long_chain, row=row, scalar=scalar))

    def inputs(seed):
        for each in (net, plain):
            each.row[...] = arrays(7, seed=seed + 50)
            each.scalar[...] = seed
        return [arrays(4, 7, seed=seed), arrays(4, 7, seed=seed + 20)]

    in_both(net, plain, inputs)


LAYOUTS = {
    "summed": lambda y: y.sum(),
    "summed over rows": lambda y: y.sum(axis=1),
    "mean of columns": lambda y: y.mean(axis=0, keepdims=True),
    "transposed": lambda y: y.transpose(2, 0, 1) * 3.0,
    "part": lambda y: y[:, 1:3],
    "reversed": lambda y: y[:, ::-1] + 0.0,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*ONE, "scaled"])
def test_gradients_that_lie_in_another_order_are_the_same_bits(layout, name):
    """Sums after the chain see the order in memory that they see without a plan."""
    operator = ONE.get(name, lambda x: 2.0 * x)

    def chain(self, x):
        return -operator((x + self.bias) * 3.0) - self.table

    net, plain = pair(Chain(chain, bias=nn.Parameter(arrays(5, seed=8)), table=arrays(41, 6, 5, seed=7)))
    in_both(net, plain, lambda seed: [arrays(41, 6, 5, seed=seed)], LAYOUTS[layout])


def test_learnt_rows_and_numbers_get_the_sums_of_their_gradients():
    def chain(self, x):
        return F.relu(x * self.scale + self.shift).tanh() * self.factor * x

    attributes = {"scale": (6,), "shift": (1, 6), "factor": ()}
    params = {name: nn.Parameter(arrays(*shape, seed=4)) for name, shape in attributes.items()}
    net, plain = pair(Chain(chain, **params))
    in_both(net, plain, lambda seed: [arrays(30, 6, seed=seed)])


def test_columns_other_dtypes_and_transposed_operands_break_chains():
    def chain(self, x, y):
        a = (x * 2 + 1) * self.column
        b = a.tanh() + y.T
        c = (b * b).astype(np.float64) - np.float64(0.5)
        return -(c * self.wide) + 1, b - self.wide

    net, plain = pair(Chain(chain, column=nn.Parameter(arrays(6, 1)), wide=arrays(6, 4, dtype=np.float64)))
    in_both(net, plain, lambda seed: [arrays(6, 4, seed=seed), arrays(4, 6, seed=seed + 9)])


def test_results_inside_of_a_chain_that_others_read():
    def chain(self, x):
        a = (x + 1) * x
        b = a.tanh() * 2
        c = F.relu(b) - a
        outside = b.sum(axis=0) + self.layer(a).sum()
        return c * b + outside, a, (b[1:] * 2).sum(), a.reshape(-1)[::-1].exp() + 1

    net, plain = pair(Chain(chain, layer=nn.Dense(5, 3, weight_init=nn.init.Xavier(1))))
    in_both(net, plain, lambda seed: [arrays(4, 5, seed=seed)])


def test_one_operand_several_times():
    def chain(self, x):
        y = x * x + x
        return (y + y) * (y - x) * self.w + self.w * y

    net, plain = pair(Chain(chain, w=nn.Parameter(arrays(4, 5, seed=3))))
    in_both(net, plain, lambda seed: [arrays(4, 5, seed=seed)])
    for each in (net, plain):
        each.w.attach_grad("add")
    in_both(net, plain, lambda seed: [arrays(4, 5, seed=seed)])


def test_parameters_whose_gradients_are_not_wanted():
    def chain(self, x):
        return ((x * self.a).tanh() / self.b - self.c) * self.a

    net, plain = pair(Chain(chain, **{name: nn.Parameter(arrays(4, 5, seed=ord(name))) for name in "abc"}))
    for reqs in itertools.product(["write", "null"], repeat=3):
        for each in (net, plain):
            for param, req in zip(each.parameters(), reqs, strict=True):
                param.attach_grad(req)
        inputs = [arrays(4, 5, seed=len(reqs))]
        for _ in range(2):
            found, expected = ([each for each in run(one, inputs) if each is not None] for one in (net, plain))
            same(found, expected)


def test_hooks_come_in_the_same_order():
    def chain(self, x):
        return ((x * self.a + self.b).tanh() * self.c) - self.a

    net, plain = pair(Chain(chain, **{name: nn.Parameter(arrays(4, 5, seed=ord(name))) for name in "abc"}))
    for _ in range(3):
        orders = []
        for each in (net, plain):
            seen = []
            for param in each.parameters():
                param.grad_hook = lambda param, seen=seen: seen.append((param.name, param.grad.copy()))
            run(each, [arrays(4, 5)])
            orders.append(seen)
        assert [name for name, _ in orders[0]] == [name for name, _ in orders[1]]
        same([grad for _, grad in orders[0]], [grad for _, grad in orders[1]])


def test_an_update_under_way_is_waited_for_before_the_chain_that_reads_it():
    def chain(self, x):
        return (x * 2 + self.w) * self.w

    net, plain = pair(Chain(chain, w=nn.Parameter(arrays(4, 5, seed=3))))
    for _ in range(3):
        net(arrays(4, 5))

    def hook(param):
        param.data_hook = None
        param.data[...] *= 0.5

    net.w.data_hook = hook
    plain.w.data[...] *= 0.5
    same([net(arrays(4, 5)).data], [plain(arrays(4, 5)).data])


def test_what_only_the_chain_reads_is_not_kept(plans):
    """With a tape a chain of twenty additions needs its result, not twenty."""
    net, _ = pair(Chain(lambda self, x: sum([x * (1 / (1 + n)) for n in range(20)], x)))
    x = arrays(50, 60)
    for _ in range(2):
        with autograd.record():
            net(Tensor(x))
    (plan,) = plans
    assert plan.nbytes == 2 * x.nbytes
    assert len(plan._calls) == kernel_calls(plan) == 1


def test_where_only_numpy_would_compute_there_is_no_chain(plans):
    net, plain = pair(Chain(lambda self, x: self.layer(x).tanh().exp(), layer=nn.Dense(3, 3)))
    in_both(net, plain, lambda seed: [arrays(4, 3, seed=seed)])
    assert [kernel_calls(plan) for plan in plans] == [0, 0]


def test_numpy_computes_what_is_its_own_in_pieces(plans):
    net, plain = pair(Chain(lambda self, x: ((x * 2).tanh() + 1) * 0.5))
    in_both(net, plain, lambda seed: [arrays(5, 20000, seed=seed)])
    for plan in plans:
        ((run_of_program, _),) = plan._calls
        called = [function for function, _ in run_of_program.__self__._made]
        assert [function is np.tanh for function in called] == [False, True, False] * 4


@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_bias_goes_with_the_chain_that_follows(activation, plans):
    def chain(self, x):
        h = gelu(self.layer(x)) * 2
        return F.relu(self.other(h)) + h, self.last(h).sigmoid() - 1

    layers = [nn.Dense(6, 6, activation=activation, weight_init=nn.init.Xavier(n)) for n in (1, 2, 3)]
    net, plain = pair(Chain(chain, **dict(zip(("layer", "other", "last"), layers, strict=True))))
    for each in (net, plain):
        for number, param in enumerate(each.parameters()):
            param.data[...] += arrays(*param.shape, seed=number) * 0.1
    for rows in (1, 9, 300):
        in_both(net, plain, lambda seed, rows=rows: [arrays(rows, 6, seed=seed)])
    add_bias = kernels.load("networks").add_bias
    epilogues = {each.entry_point for each in add_bias.overloads.values()}
    for plan in plans:
        assert not any(function in epilogues for function, _ in plan._calls)


def test_order_in_memory():
    x = np.zeros((4, 6, 5))
    for each in (x, x[:, ::2], x[1:, :, 2:3], np.broadcast_to(x[:, :1, :1], x.shape), np.broadcast_to(0.0, x.shape)):
        assert _lies_in_order(each) and (-each).flags.c_contiguous
    for each in (x.T, x[:, ::-1], x.transpose(1, 0, 2)):
        assert not _lies_in_order(each)
    assert executor.chained([], []) == []


def arithmetic(self, x, y):
    return F.relu(x * y + 0.1) * y - x


def with_numpy(self, x, y):
    return ((x.tanh() * y).sigmoid() - x).exp()


LARGE = (3, 10007)


@pytest.mark.parametrize("chain", [arithmetic, with_numpy])
@pytest.mark.parametrize("recording", [False, True])
def test_large_inputs_and_outputs_of_chains_are_not_copied(chain, recording, plans):
    net, plain = pair(Chain(chain))
    earlier = []
    for seed in range(5):
        inputs = [arrays(*LARGE, seed=2 * seed + i) for i in (0, 1)]
        if recording:
            same(run(net, inputs), run(plain, inputs))
        else:
            earlier.append((net(*inputs).data, plain(*inputs).data))
    for found, expected in earlier:
        same([found], [expected])
    (plan,) = plans
    assert plan._places[0].array is (inputs[0] if recording else None)
    unaligned = np.frombuffer(b"." + inputs[0].tobytes(), np.float32, offset=1).reshape(LARGE)
    assert not unaligned.flags.aligned
    same([net(unaligned, inputs[1]).data], [plain(unaligned, inputs[1]).data])


VIEWS = {
    "every second column": lambda x: x[:, ::2], "every second row": lambda x: x[::2],
    "first columns": lambda x: x[:, :9], "mirrored": lambda x: x[:, ::-1], "upside down": lambda x: x[::-1],
    "transposed": lambda x: x.T, "cropped": lambda x: x.reshape(-1, 3, 64, 64)[:, :, 4:60, 4:60],
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("recording", [False, True])
def test_large_inputs_that_are_views_are_the_same_bits(view, recording):
    net, plain = pair(Chain(arithmetic))
    for seed in range(4):
        inputs = [VIEWS[view](arrays(4096, 24, seed=2 * seed + i)) for i in (0, 1)]
        assert inputs[0].nbytes >= executor._MOVES_FROM and not inputs[0].flags.c_contiguous
        if recording:
            same(run(net, inputs), run(plain, inputs))
        else:
            same([net(*inputs).data], [plain(*inputs).data])


@pytest.mark.parametrize("size", [8, 20_000])
def test_the_other_order_of_bytes_breaks_chains(size):
    net, plain = pair(Chain(lambda self, x: x.sigmoid().sigmoid()))
    for seed in range(4):
        x = arrays(size, seed=seed).astype(np.dtype(np.float32).newbyteorder())
        same([net(x).data], [plain(x).data])


def test_large_results_may_be_read_after_backward_and_before_it():
    net, plain = pair(Chain(arithmetic))
    x, y = (arrays(*LARGE, seed=seed) for seed in (1, 2))
    for _ in range(3):
        run(net, [x, y])
    found = []
    for each in (net, plain):
        given = [[Tensor(value * factor) for value in (x, y)] for factor in (1, 2, 3)]
        for pair_of in given:
            pair_of[0].attach_grad()
        with autograd.record():
            results = [each(*pair_of) for pair_of in given]
        autograd.backward(results, retain_graph=True)
        first = [pair_of[0].grad.copy() for pair_of in given]
        with autograd.record():
            other = each(Tensor(x), given[0][0])
        autograd.backward([*results, other])
        found.append([*first, *(z.data for z in (*results, other)), *(pair_of[0].grad for pair_of in given)])
    same(*found)


def layer(self, x):
    return self.layer(x)


def layer_and_function(self, x):
    return F.relu(self.layer(x))


def product(self, x):
    return F.relu(x @ self.layer.weight + self.layer.bias)


@pytest.mark.parametrize("rows", [2047, 2048, 4096])
@pytest.mark.parametrize(("body", "activation"), [(layer, "relu"), (layer_and_function, None), (product, None)])
def test_a_relu_that_is_returned_too_has_its_gradient(body, activation, rows):
    """Large results of chains are written where they are returned, but backward reads this one."""

    def chain(self, x):
        h = body(self, x)
        return h, h * 0.5 + 1

    net, plain = pair(Chain(chain, layer=nn.Dense(8, 8, activation=activation, weight_init=nn.init.Xavier(1))))
    for each in (net, plain):
        each.layer.bias.data[...] = 0.5
    in_both(net, plain, lambda seed: [arrays(rows, 8, seed=seed)])


def test_large_inputs_that_others_read_too_are_copied():
    def chain(self, x, y):
        return arithmetic(self, x, y) * self.layer(x), x.sum(), (y * 2 + 1) * y

    net, plain = pair(Chain(chain, layer=nn.Dense(20, 20, weight_init=nn.init.Xavier(1))))
    in_both(net, plain, lambda seed: [arrays(1000, 20, seed=2 * seed + i) for i in (0, 1)])


def test_a_row_whose_memory_is_given_out_to_the_chains_result():
    """Its first elements would be gone when the second row is computed."""

    def chain(self, x, y):
        total = self.layer(x).sum()
        row = y.max(axis=0)  # where the layer's result was
        return ((y + row) * 2 - total) * 3

    net, plain = pair(Chain(chain, layer=nn.Dense(3, 2500, weight_init=nn.init.Xavier(1))))
    for seed in range(3):
        inputs = arrays(4, 3, seed=seed), arrays(4, 2500, seed=seed + 9)
        same([net(*inputs).data], [plain(*inputs).data])


def test_planning_a_long_chain_takes_time_by_its_length(monkeypatch):
    compared = []

    def is_hazard(target, x, plain=fusion._is_hazard):
        compared.append(1)
        return plain(target, x)

    monkeypatch.setattr(fusion, "_is_hazard", is_hazard)
    counts = []
    for length in (150, 300):

        def chain(self, x, length=length):
            for number in range(length):
                x = (x * self.w - 0.25).tanh() if number % 2 else x * 1.5
            return x

        net, plain = pair(Chain(chain, w=nn.Parameter(arrays(4, 5, seed=3))))
        compared.clear()
        in_both(net, plain, lambda seed: [arrays(4, 5, seed=seed)])
        counts.append(len(compared))
    assert 0 < counts[1] < 2.5 * counts[0]
