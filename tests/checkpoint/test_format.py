"""docs/checkpoint-format.md: its reader reads what is saved, and its manifest is like those that are written."""

import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from saved import arrays, flip, save

from hpcdp.checkpoint import Part, PerRank, Sharded, manifest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "checkpoint-format.md").read_text()
(READER,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
(EXAMPLE,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.M | re.S)


@pytest.fixture
def read_checkpoint():
    names = {}
    exec(READER, names)
    return names["read_checkpoint"]


@pytest.mark.each_value
@pytest.mark.parametrize("compression", [None, "gzip", "lzf"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_reader_of_the_page(read_checkpoint, ranks, compression, tmp_path):
    (path,) = save(tmp_path, ranks=ranks, compression=compression)
    state = read_checkpoint(path)
    assert set(state) == {"net", "optimizer", "rng"}
    for name, expected in arrays().items():
        np.testing.assert_array_equal(state["net"][name], expected.bits if name == "brain" else expected)
    assert np.isnan(state["optimizer"].pop("loss"))
    assert state["optimizer"] == {"epoch": 3, "lr": 0.5, "milestones": [1, 2], "name": "sgd"}
    assert [each["x"].tolist() for each in state["rng"]] == [[rank] * 3 for rank in range(ranks)]


def test_it_finds_damage(read_checkpoint, tmp_path):
    (path,) = save(tmp_path)
    part = manifest.read(path).tensors["net/weight"].parts[-1]
    flip(path / part.file, part.offset + 4 * part.count - 1)
    with pytest.raises(AssertionError, match=rf"{part.file}, {part.dataset}: damaged"):
        read_checkpoint(path)
    flip(path / "manifest.json", 100)
    with pytest.raises(AssertionError, match="the manifest is damaged"):
        read_checkpoint(path)


def test_the_manifest_of_the_page_has_the_members_of_a_real_one(tmp_path):
    def state(step, world):
        weight = np.arange(6, dtype=np.float32).reshape(3, 2)
        own = Part(3 * world.rank, weight.reshape(-1)[3 * world.rank :][:3])
        net = {"weight": Sharded(weight.shape, weight.dtype, [own]), "bias": np.zeros(2)}
        return {"net": net, "epoch": 3, "loss": float("inf"), "rng": PerRank({"seed": world.rank})}

    (path,) = save(tmp_path, state=state)
    real, shown = json.loads((path / "manifest.json").read_bytes()), json.loads(EXAMPLE)
    for own, other in zip(real["tensors"]["net/weight"]["parts"], shown["tensors"]["net/weight"]["parts"], strict=True):
        own["offset"] = other["offset"]  # where HDF5 begins with data is a matter of its version
    assert list(shown) == list(real)
    assert shown["state"] == real["state"]
    assert shown["tensors"]["net/weight"] == real["tensors"]["net/weight"]
    for name in ("format", "version", "block_nbytes", "step", "commit_file"):
        assert shown[name] == real[name]
    for name in ("world", "versions"):
        assert set(shown[name]) == set(real[name])
    assert [list(each) for each in shown["files"]] == [list(each) for each in real["files"]]


def test_the_index_shows_every_tensor_whole(tmp_path):
    (path,) = save(tmp_path, ranks=3)
    with h5py.File(path / "index.h5") as index:
        for name, expected in arrays().items():
            bits = expected.bits if name == "brain" else expected
            np.testing.assert_array_equal(index["net"][name][()], bits)
        assert index["net/brain"].attrs["dtype"] == "bfloat16"
