"""What says where everything is: read back as it was, or refused."""

import copy
import json
import zlib

import numpy as np
import pytest
from raises import raises

from hpcdp.checkpoint import flatten, manifest
from hpcdp.checkpoint.hdf5_file import BLOCK_NBYTES, File, Stored
from hpcdp.checkpoint.manifest import Manifest, StoredTensor
from hpcdp.errors import DataError


def stored(name, first, count, sums=1, file="shard-00000.h5"):
    return Stored(name, first, count, file, name, 4096, [7] * sums)


def sample() -> Manifest:
    state = {"dict": [["a", {"tensor": "a"}], [3, {"list": [None, True, {"float": "nan"}, 1.5, "x"]}],
                      ["own", {"ranks": [{"tuple": []}, {"tensor": "b", "kind": "torch"}]}]]}  # fmt: skip
    count = BLOCK_NBYTES // 2
    tensors = {
        "a": StoredTensor((count + 1, 1), "float32", (stored("a", 0, 1), stored("a", 1, count, 2, "shard-00001.h5"))),
        "b": StoredTensor((), "bfloat16", (stored("b", 0, 1),)),
        "none": StoredTensor((0, 5), "bool", ()),
    }
    files = [File("shard-00000.h5", 10_000, 1), File("shard-00001.h5", 4 << 20, 2), File("index.h5", 800, 3)]
    return Manifest(12, state, tensors, files, {"size": 2, "num_nodes": 1}, {"numpy": "2"}, {"loss": 0.5}, {"lr": [1]},
                    "2030-01-01T00:00:00+00:00")  # fmt: skip


def signed(members: dict) -> bytes:
    """As a manifest whose checksum is right."""
    members = {name: value for name, value in members.items() if name != "crc32"}
    body = json.dumps(members)[:-1].encode() + b",\n"
    return body + f'"crc32": "{zlib.crc32(body):08x}"}}\n'.encode()


def test_it_is_read_back(tmp_path):
    whole = sample()
    (tmp_path / manifest.NAME).write_bytes(whole.to_json())
    assert manifest.read(tmp_path) == whole
    assert json.loads(whole.to_json())["tensors"]["a"]["parts"][0]["crc32"] == ["00000007"]
    assert whole.nbytes == (BLOCK_NBYTES // 2 + 1) * 4 + 2
    assert manifest.parse(signed(json.loads(whole.to_json())), "x") == whole


def test_no_byte_of_it_may_change():
    content = sample().to_json()
    for at in range(len(content)):
        for bit in (1, 32, 128):
            torn = bytearray(content)
            torn[at] ^= bit
            with raises(DataError, operation="read the checkpoint", where="here", expected="undamaged"):
                manifest.parse(bytes(torn), "here")
    for length in range(len(content)):
        with pytest.raises(DataError):
            manifest.parse(content[:length], "here")


def change(members, path, value):
    *keys, last = path
    for key in keys:
        members = members[key]
    if value is KeyError:
        del members[last]
    else:
        members[last] = value


PART = ("tensors", "a", "parts", 0)
WRONG = [
    (("format",), "other"),
    (("version",), 2),
    (("block_nbytes",), 1),
    (("step",), -1),
    (("step",), True),
    (("files",), {"a": 1}),
    (("files", 0, "name"), "../x"),
    (("files", 0, "name"), "/etc/passwd"),
    (("files", 0, "name"), ""),
    (("files", 0, "name"), "other"),
    (("files", 0, "name"), "\ud800"),
    (("files", 0, "name"), "a\0b"),
    (("files", 2, "name"), "é" * 128),
    (("files", 0, "nbytes"), 1.5),
    (("files", 0, "nbytes"), 4099),
    (("versions", "numpy"), 2),
    (("metrics",), []),
    (("metrics", "loss"), "x"),
    (("commit_file",), 0),
    (("config",), None),
    (("written",), 3),
    (("tensors",), []),
    (("tensors", "a", "dtype"), None),
    (("tensors", "a", "dtype"), "object"),
    (("tensors", "a", "dtype"), ">f4"),
    (("tensors", "a", "dtype"), "float64"),
    (("tensors", "a", "dtype"), ["float32"]),
    (("tensors", "a", "shape"), [1 << 40]),
    (("tensors", "a", "shape"), 5),
    (("tensors", "a", "shape"), [True]),
    (("tensors", "none", "shape"), [0, 1 << 40, 1 << 40]),
    (("tensors", "none", "shape"), [0] * 33),
    ((*PART, "first"), 1),
    ((*PART, "count"), 2),
    ((*PART, "count"), 1 << 64),
    ((*PART, "offset"), -1),
    ((*PART, "offset"), 9_997),
    ((*PART, "offset"), 1 << 63),
    ((*PART, "offset"), "0"),
    ((*PART, "file"), "shard-00002.h5"),
    ((*PART, "file"), []),
    ((*PART, "dataset"), 5),
    ((*PART, "crc32"), []),
    ((*PART, "crc32"), ["x"]),
    ((*PART, "crc32"), [5]),
    (("tensors", "a", "parts"), []),
    (("state",), []),
    (("state",), {}),
    (("state",), {"other": 1}),
    (("state",), {"tensor": "c"}),
    (("state",), {"tensor": ["a"]}),
    (("state",), {"tensor": "a", "kind": ["torch"]}),
    (("state",), {"tensor": "a", "dict": []}),
    (("state",), {"dict": [], "tensor": "c"}),
    (("state",), {"dict": {}}),
    (("state",), {"dict": [["a"]]}),
    (("state",), {"dict": [["a", 1, 2]]}),
    (("state",), {"dict": [[1.5, 1]]}),
    (("state",), {"float": "1"}),
    (("state",), {"ranks": {"tensor": "a"}}),
    *(((name,), KeyError) for name in json.loads(sample().to_json()) if name != "crc32"),
    *(((*PART, name), KeyError) for name in ("first", "count", "offset", "file", "dataset", "crc32")),
]


@pytest.mark.parametrize(("path", "value"), WRONG)
def test_what_it_says_must_fit(path, value):
    members = copy.deepcopy(json.loads(sample().to_json()))
    change(members, path, value)
    with raises(DataError, operation="read the checkpoint", where="here", expected=1):
        manifest.parse(signed(members), "here")


def test_what_is_wrong_is_said_in_short():
    members = json.loads(sample().to_json())
    members["written"] = ["x" * 10_000]
    with raises(DataError, operation="read the checkpoint", where="here", expected=1, got="written") as info:
        manifest.parse(signed(members), "here")
    assert len(str(info.value)) < 400


def test_states_are_read_as_deep_as_they_are_saved():
    members = json.loads(sample().to_json())
    members["state"] = 1
    for _ in range(flatten.DEEPEST):
        members["state"] = {"list": [members["state"]]}
    manifest.parse(signed(members), "here")
    members["state"] = {"list": [members["state"]]}
    with raises(DataError, operation="read the checkpoint", where="here", expected=1, got="deeply"):
        manifest.parse(signed(members), "here")
    members["state"] = "HERE"
    text = json.dumps(members).replace('"HERE"', '{"list": [' * 100_000 + "1" + "]}" * 100_000)
    body = text[: text.rindex(', "crc32"')].encode() + b",\n"
    with raises(DataError, operation="read the checkpoint", where="here", got="JSON"):
        manifest.parse(body + f'"crc32": "{zlib.crc32(body):08x}"}}\n'.encode(), "here")


@pytest.mark.parametrize(
    ("runs", "fields"),
    [
        ([(0, 3), (4, 6)], {"got": [3, 10]}),
        ([(0, 5), (4, 6)], {"got": [4, 10]}),
        ([(0, 9)], {"got": [9, 10, "missing"]}),
        ([(0, 10), (0, 10)], {"got": [0, 9, 10, "twice"]}),
        ([], {"got": [0, 9, 10, "missing"]}),
    ],
)
def test_each_element_is_stored_once(runs, fields):
    held = flatten.HeldTensor("a", (10,), "int8", np.dtype("i1"), (), 1, 0)
    parts = [stored("a", first, last - first) for first, last in reversed(runs)]
    with raises(DataError, operation="save", where="a", **fields):
        manifest.join([held], parts)


def test_a_missing_one(tmp_path):
    with raises(DataError, operation="read the checkpoint", where=tmp_path / "manifest.json"):
        manifest.read(tmp_path)
