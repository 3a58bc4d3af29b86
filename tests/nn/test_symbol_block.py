"""Networks that are exported and loaded again: the same bits elsewhere, and one line about files that are not right."""

import json
import os
import subprocess
import sys
import textwrap

import h5py
import numpy as np
import pytest
from raises import raises
from threadpoolctl import threadpool_limits

from hpcdp import autograd, nn
from hpcdp.core import hdf5
from hpcdp.core.arrays import bits
from hpcdp.core.files import own_part_of
from hpcdp.errors import ConfigError, DataError, HpcdpError


def arrays(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Mixed(nn.Module):
    def __init__(self):
        self.body = nn.Sequential(nn.Conv2D(1, 3, 3), nn.BatchNorm(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten())
        self.table = arrays(108, seed=3)
        self.part = nn.Dense(108, 4)

    def forward(self, x, y):
        h = self.part(self.body(x) * self.table)[:, [2, 0]]
        h = autograd.where(h > np.float32(0.25), h, -h[..., ::-1]) ** 2.0 - 1
        return h.astype(np.float64), autograd.concatenate([h, y[:, :1]], axis=1).max(axis=-1)


CASES = {
    "lenet": (lambda: nn.models.lenet((1, 8, 8)), [(2, 1, 8, 8)]),
    "mlp": (lambda: nn.models.mlp(6, 3, (5,)), [(2, 6)]),
    "in bfloat16": (lambda: nn.models.mlp(6, 3, (5,)).to("bfloat16"), [(2, 6)]),
    "resnet18": (lambda: nn.models.resnet18((1, 4, 4)), [(2, 1, 4, 4)]),
    "mixed": (Mixed, [(2, 1, 8, 8), (2, 3)]),
    "char_lstm": (lambda: nn.models.char_lstm((5,), 7, width=6, size=16), [(2, 5)]),
    "gpt": (lambda: nn.models.gpt((5,), 7, width=12, heads=3, layers=2), [(2, 4)]),
}


def exported(name, tmp_path):
    make, shapes = CASES[name]
    net = make()
    for number, param in enumerate([*net.parameters(), *(buffer for _, buffer in net.named_buffers())]):
        param.data[...] = np.abs(arrays(*param.shape, seed=number)) * 0.05 + 0.01
    inputs = [arrays(*shape, seed=50 + i) for i, shape in enumerate(shapes)]
    if name in ("char_lstm", "gpt"):
        inputs = [np.abs(each * 2).astype(np.int64) for each in inputs]
    net.hybridize()
    expected = net(*inputs)
    net.export(tmp_path / "net")
    return net, inputs, expected if isinstance(expected, tuple) else (expected,)


@pytest.mark.thorough
def test_a_process_without_the_classes_computes_the_same_bits(tmp_path):
    expected = {}
    for name in CASES:
        (tmp_path / name).mkdir()
        with threadpool_limits(1):  # as there: several threads share out products otherwise
            _, inputs, expected[name] = exported(name, tmp_path / name)
        np.savez(tmp_path / name / "inputs.npz", *inputs)
    code = """
        import sys
        import numpy as np
        from hpcdp import nn
        from hpcdp.core.arrays import bits
        assert "mpi4py" not in sys.modules
        for folder in sys.argv[1:]:
            inputs = np.load(f"{folder}/inputs.npz")
            net = nn.SymbolBlock.load(f"{folder}/net")
            net.hybridize()
            for _ in range(3):
                found = net(*[inputs[each] for each in inputs.files])
            found = [each.data for each in (found if isinstance(found, tuple) else (found,))]
            np.savez(f"{folder}/found.npz", *[bits(each) for each in found], dtypes=[str(each.dtype) for each in found])
    """
    command = [sys.executable, "-c", textwrap.dedent(code), *(str(tmp_path / name) for name in CASES)]
    subprocess.run(command, check=True, timeout=100, env=os.environ | {"OMP_NUM_THREADS": "1"})
    for name in CASES:
        with np.load(tmp_path / name / "found.npz") as found:
            assert list(found["dtypes"]) == [str(value.dtype) for value in expected[name]]
            for number, value in enumerate(expected[name]):
                np.testing.assert_array_equal(found[f"arr_{number}"], bits(value.data), err_msg=name)


def test_what_was_loaded_takes_other_batches_and_can_be_trained(tmp_path):
    net, _, _ = exported("lenet", tmp_path)
    loaded = nn.SymbolBlock.load(tmp_path / "net.json")
    assert [name for name, _ in loaded.named_parameters()] == [name for name, _ in net.named_parameters()]
    x = arrays(5, 1, 8, 8)
    np.testing.assert_array_equal(loaded(x).data, net(x).data)
    for each in (loaded, net):
        with autograd.record():
            loss = nn.functional.softmax_cross_entropy(each(x), np.arange(5))
        loss.backward()
    for own, other in zip(loaded.parameters(), net.parameters(), strict=True):
        np.testing.assert_array_equal(own.grad, other.grad)
    loaded.load_state_dict(net.state_dict())
    assert "operations" in repr(loaded)
    for wrong, fields in (
        (x.astype(np.float64), {"got": "float64"}),
        (arrays(5, 1, 8, 9), {"got": ["float32", (5, 1, 8, 9)]}),
    ):
        with raises(
            ConfigError, operation="SymbolBlock", where="inputs", expected=["float32", "(batch, 1, 8, 8)"], **fields
        ):
            loaded(wrong)


class Pauses(nn.Module):
    def __init__(self):
        self.first, self.last = nn.Dense(3, 3), nn.Dense(3, 2)

    def forward(self, x):
        with autograd.pause():
            scale = self.first(x).exp() + 1
            place = scale.argmax(axis=1)
        h = self.first(x) * scale / scale.sum(axis=1, keepdims=True)
        return self.last(h), scale, place


def test_no_gradient_goes_back_where_the_forward_pauses(tmp_path):
    net, x = Pauses(), arrays(4, 3)
    net.hybridize()
    expected = net(x)
    net.export(tmp_path / "net")
    block = nn.SymbolBlock.load(tmp_path / "net")
    for a, b in zip(expected, block(x), strict=True):
        np.testing.assert_array_equal(a.data, b.data)
    for each in (net, block):
        given = autograd.Tensor(x)
        given.attach_grad()
        with autograd.record(train_mode=False):
            y, scale, _ = each(given)
        assert scale.node is None
        y.backward()
        each.found = given.grad
    np.testing.assert_array_equal(net.found, block.found)
    for mine, its in zip(net.parameters(), block.parameters(), strict=True):
        assert mine.name == its.name
        np.testing.assert_array_equal(mine.grad, its.grad)
    assert block(arrays(7, 3))[0].shape == (7, 2)


def test_a_call_that_has_found_out_shapes_is_not_enough_to_export(tmp_path):
    net = nn.Sequential(nn.Dense(None, 5))
    net.hybridize()
    net(arrays(2, 6))
    with raises(ConfigError, operation="hybridize", where="Sequential", remedy="net(x)"):
        net.export(tmp_path / "net")
    net(arrays(2, 6))
    net.export(tmp_path / "net")


def test_a_call_with_an_empty_batch_is_one_to_export(tmp_path):
    net = nn.models.mlp(6, 3, (5,))
    net.hybridize()
    assert net(np.zeros((0, 6), np.float32)).shape == (0, 3)  # whose strides are 0 in NumPy, unlike those of x[:0]
    net.export(tmp_path / "net")
    x = arrays(2, 6)
    np.testing.assert_array_equal(nn.SymbolBlock.load(tmp_path / "net")(x).data, net(x).data)


def test_calls_within_asynchronous_are_none_to_export(tmp_path):
    net = nn.Dense(6, 3)
    net.hybridize()
    with autograd.asynchronous():
        for _ in range(2):
            net(arrays(2, 6)).asnumpy()
        with raises(
            ConfigError,
            operation="hybridize",
            where="Dense",
            expected="asynchronous()",
            remedy=["asynchronous()", "net(x)"],
        ):
            net.export(tmp_path / "net")
    with raises(ConfigError, operation="hybridize", where="Dense", expected="asynchronous()", remedy="net(x)"):
        net.export(tmp_path / "net")
    net(arrays(2, 6))
    net.export(tmp_path / "net")


def test_there_is_something_to_export_only_after_a_prediction(tmp_path):
    net = nn.models.mlp(6, 3, (5,))
    with raises(ConfigError, operation="Sequential", remedy=["hybridize()", "net(x)"]):
        net.export(tmp_path / "net")
    net.hybridize()
    with autograd.record():
        net(arrays(2, 6))
    with raises(ConfigError, operation="hybridize", where="Sequential", expected="record()", remedy="net(x)"):
        net.export(tmp_path / "net")
    net(arrays(2, 6))
    net.add(nn.Tanh())
    with raises(ConfigError, operation="hybridize", where="Sequential"):
        net.export(tmp_path / "net")
    net(arrays(2, 6))
    with raises(DataError, operation="export", where=tmp_path / "absent/net.json"):
        net.export(tmp_path / "absent" / "net")


@pytest.mark.parametrize("file", ["net.json", "net.h5"])
def test_an_export_that_fails_leaves_the_pair_that_was_there_and_nothing_beside(file, tmp_path):
    net, _, _ = exported("mlp", tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for param in net.parameters():
        param.data[...] = 1
    in_the_way = own_part_of(tmp_path / file)
    in_the_way.mkdir()
    with raises(DataError, where=f"{tmp_path}/{file}"):
        net.export(tmp_path / "net")
    in_the_way.rmdir()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_processes_may_export_to_one_path_at_a_time(tmp_path, monkeypatch):
    net, inputs, (expected,) = exported("mlp", tmp_path)
    write = hdf5.write_arrays

    def after_another_process(path, named):
        monkeypatch.setattr(hdf5, "write_arrays", write)
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
            write(path, named)
        else:
            os._exit(net.export(tmp_path / "net")[0].name != "net.json")

    monkeypatch.setattr(hdf5, "write_arrays", after_another_process)
    net.export(tmp_path / "net")
    np.testing.assert_array_equal(nn.SymbolBlock.load(tmp_path / "net")(*inputs).data, expected.data)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["net.h5", "net.json"]


@pytest.mark.parametrize("path", ["nets/", "nets/.", "..", "."])
def test_the_path_of_a_folder_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets").mkdir()
    net = nn.models.mlp(6, 3, (5,))
    net.hybridize()
    net(arrays(2, 6))
    with raises(ConfigError, operation="export", where=path):
        net.export(path)
    with raises(ConfigError, operation="load", where=path):
        nn.SymbolBlock.load(path)
    assert [each.name for each in tmp_path.rglob("*")] == ["nets"]


def test_every_truncated_or_forged_description_is_refused_by_one_line(tmp_path):
    exported("mixed", tmp_path)
    path = tmp_path / "net.json"
    text = path.read_text()
    whole = json.loads(text)
    for length in range(0, len(text) - 2, 97):
        path.write_text(text[:length])
        with raises(DataError, operation="load", where=path) as error:
            nn.SymbolBlock.load(tmp_path / "net")
        assert "\n" not in str(error.value)

    def places(value, at=()):
        if isinstance(value, dict | list):
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                yield (*at, key)
                yield from places(each, (*at, key))

    rng = np.random.default_rng(0)
    everywhere = list(places(whole))
    for number in rng.permutation(len(everywhere))[:250]:
        forged = json.loads(text)
        *before, last = everywhere[number]
        holder = forged
        for key in before:
            holder = holder[key]
        holder[last] = [None, -1, 10**9, "x", [], {}, {"node": 999, "output": 0}, 0.5][int(rng.integers(8))]
        path.write_text(json.dumps(forged))
        try:
            net = nn.SymbolBlock.load(tmp_path / "net")
            net(arrays(2, 1, 8, 8), arrays(2, 3))
        except HpcdpError as error:
            assert "\n" not in str(error)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    net, inputs, _ = exported("mlp", tmp_path)
    with h5py.File(tmp_path / "net.h5", "r+") as file:
        file["1.weight"][0, 0] += 1
    with raises(DataError, operation="load", where=f"{tmp_path}/net.h5:1.weight"):
        nn.SymbolBlock.load(tmp_path / "net")
    with h5py.File(tmp_path / "net.h5", "r+") as file:
        del file["1.weight"]
    with raises(DataError, operation="read HDF5", where=f"{tmp_path}/net.h5:1.weight"):
        nn.SymbolBlock.load(tmp_path / "net")
    (tmp_path / "net.h5").write_bytes(b"no HDF5")
    with raises(DataError, operation="read HDF5", where=tmp_path / "net.h5", expected="HDF5"):
        nn.SymbolBlock.load(tmp_path / "net")
    (tmp_path / "net.h5").unlink()
    with raises(DataError, operation="read HDF5", where=tmp_path / "net.h5"):
        nn.SymbolBlock.load(tmp_path / "net")
    forged = json.loads((tmp_path / "net.json").read_text())
    net.export(tmp_path / "net")
    forged["tensors"][0]["name"] = "forward"
    (tmp_path / "net.json").write_text(json.dumps(forged))
    with raises(DataError, operation="read HDF5", where=f"{tmp_path}/net.h5:forward"):
        nn.SymbolBlock.load(tmp_path / "net")
    assert inputs


class ByBatch(nn.Module):
    def __init__(self, what):
        self.__dict__["what"] = what
        self.scale = nn.Parameter(arrays(3))

    def forward(self, x):
        return self.what(x * self.scale)


OF_ONE_SIZE = {
    "mean": lambda y: y - y.mean(axis=0),
    "mean of all": lambda y: y.mean(),
    "len": lambda y: y / len(y),
    "half": lambda y: y[: len(y) // 2],
    "list": lambda y: y[[list(range(len(y)))]],
    "rows": lambda y: autograd.stack([y[i] for i in range(len(y))]),
    "shape": lambda y: y.reshape(len(y) * 3, 1),
    "condition": lambda y: y if len(y) > 1 else -y,
}
OF_ANY_SIZE = {
    "sum": lambda y: y - y.sum(axis=0),
    "columns": lambda y: y.mean(axis=1),
    "shape": lambda y: y.reshape(len(y), 3, 1),
    "first row": lambda y: y - y[0],
}


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("what", OF_ONE_SIZE)
def test_a_forward_that_makes_numbers_of_the_batch_is_loaded_for_batches_of_that_size(tmp_path, what, rows):
    net = ByBatch(OF_ONE_SIZE[what])
    net.hybridize()
    expected = net(arrays(rows, 3))
    net.export(tmp_path / "net")
    loaded = nn.SymbolBlock.load(tmp_path / "net")
    np.testing.assert_array_equal(loaded(arrays(rows, 3)).data, expected.data)
    with raises(
        ConfigError, operation="SymbolBlock", where="inputs", expected=[rows, "float32"], got=["float32", (4, 3)]
    ):
        loaded(arrays(4, 3))


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("what", OF_ANY_SIZE)
def test_a_forward_that_takes_batches_as_they_come_is_loaded_for_all(tmp_path, what, rows):
    net = ByBatch(OF_ANY_SIZE[what])
    net.hybridize()
    net(arrays(rows, 3))
    net.export(tmp_path / "net")
    loaded = nn.SymbolBlock.load(tmp_path / "net")
    for other in (1, 4, 7):
        np.testing.assert_array_equal(loaded(arrays(other, 3)).data, net(arrays(other, 3)).data)
    loaded.hybridize()
    loaded(arrays(3, 3))
    loaded.export(tmp_path / "again")
    again = nn.SymbolBlock.load(tmp_path / "again")
    np.testing.assert_array_equal(again(arrays(6, 3)).data, net(arrays(6, 3)).data)


@pytest.mark.parametrize("number", [np.longdouble(2), np.complex64(2)])
def test_a_number_that_json_does_not_have_is_refused_in_one_line(tmp_path, number):
    net = ByBatch(lambda y: y * number)
    net.hybridize()
    net(arrays(2, 3))
    with raises(ConfigError, operation="export", where="multiply", expected=64):
        net.export(tmp_path / "net")


OF_NUMPY = {
    "slice": lambda y: y[:, : np.int64(2)],
    "backwards": lambda y: y[:: np.int64(-1), ::-1],
    "unsigned": lambda y: y[..., None, np.uint8(0) : np.int32(3) : np.int8(2)],
    "array without axes": lambda y: y[:, np.array(1) :].max(axis=np.array(1)),
    "integer": lambda y: y[np.int64(1), np.array([1, 2])[0]],
    "bool": lambda y: y[True, :1],
    "axes": lambda y: y.sum(axis=(np.int64(0), np.int32(1)), keepdims=True),
    "shape": lambda y: y.reshape(np.int64(1), 1, y.shape[0], np.array(3)),
    "list": lambda y: y.reshape([np.int64(3), -1]).transpose([np.int64(1), 0]),
    "nested": lambda y: nn.functional.max_pool2d(y.reshape(1, 1, -1, 3), (np.int64(2), 2), stride=[np.int64(1), 1]),
    "dtype": lambda y: y.astype(np.float64).astype(np.dtype(">f4")),
}

IN_LISTS = {
    "flat": lambda y: y[[2, 0, 1]],
    "nested": lambda y: y[[[0, 1], [1, 0]]],
    "tuples": lambda y: y[((0, 1), (1, 0))],
    "integers of NumPy": lambda y: y[[[np.int64(0)], [1]], [[np.int64(1), 2]]],
    "floats of NumPy": lambda y: y * [np.float32(0.1), np.float32(2), np.float32(3)],
    "floats": lambda y: y - [[1.0], [2], [3], [4]],
}


@pytest.mark.parametrize("what", [*OF_NUMPY.values(), *IN_LISTS.values()], ids=[*OF_NUMPY, *IN_LISTS])
def test_numbers_are_exported_wherever_they_stand(tmp_path, what):
    net, x = ByBatch(what), arrays(4, 3)
    expected = net(x)
    net.hybridize()
    for _ in range(3):
        np.testing.assert_array_equal(net(x).data, expected.data)
    net.export(tmp_path / "net")
    loaded = nn.SymbolBlock.load(tmp_path / "net")
    loaded.hybridize()
    for _ in range(3):
        found = loaded(x)
        np.testing.assert_array_equal(found.data, expected.data)
        assert found.dtype == expected.dtype
    loaded.export(tmp_path / "again")
    files = [(tmp_path / f"{name}.json").read_text() for name in ("net", "again")]
    assert json.loads(files[0])["nodes"] == json.loads(files[1])["nodes"]


def test_a_float_of_numpy_keeps_its_dtype_as_an_attribute(tmp_path):
    net, x = nn.BatchNorm(2000, eps=np.float64(1e-3)), arrays(2, 2000)
    net.running_var.data[...] = arrays(2000, seed=1) ** 2
    expected = net(x).data
    net.hybridize()
    for _ in range(3):
        np.testing.assert_array_equal(net(x).data, expected)
    net.export(tmp_path / "net")
    np.testing.assert_array_equal(nn.SymbolBlock.load(tmp_path / "net")(x).data, expected)


class Scaled(nn.Module):
    """Its parts have names of what reads an export, and two of them have one weight."""

    def __init__(self):
        self.load, self._run, self._graph = (nn.Dense(4, 4, weight_init=nn.init.Xavier(seed)) for seed in (1, 2, 3))
        self._graph.weight = self.load.weight

    def forward(self, x):
        return self._graph(self._run(self.load(x))) / np.sqrt(x.shape[-1]) * np.float64(0.1)


def test_numbers_keep_their_dtypes_and_tensors_the_names_that_the_network_has_for_them(tmp_path):
    net, x = Scaled(), arrays(3, 4)
    net.hybridize()
    expected = net(x).data
    assert expected.dtype == np.float64
    net.export(tmp_path / "net")
    loaded = nn.SymbolBlock.load(tmp_path / "net")
    found = loaded(x).data
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, expected)
    assert [name for name, _ in loaded.named_parameters()] == [name for name, _ in net.named_parameters()]
    loaded.hybridize()
    for _ in range(3):
        np.testing.assert_array_equal(loaded(x).data, expected)


def test_a_parameter_without_axes_stays_one(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            self.scale = nn.Parameter(np.array(2.5, np.float32))

        def forward(self, x):
            return x.sum() * self.scale, self.scale * self.scale * x

    net, x = Scaled(), arrays(3, 4)
    net.hybridize()
    net(x)
    net.export(tmp_path / "net")
    for found, expected in zip(nn.SymbolBlock.load(tmp_path / "net")(x), net(x), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found.data, expected.data)
