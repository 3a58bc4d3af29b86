"""Manifests and files with any bytes: refused, or what was saved; no crash, no wrong numbers, no memory for nothing."""

import json
import os
import random
import resource
import zlib

import numpy as np
import pytest

from hpcdp.checkpoint import Manager, Part, PerRank, Sharded, manifest
from hpcdp.checkpoint.hdf5_file import ShardReader
from hpcdp.checkpoint.load import Filling
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, DataError

MUTATIONS = 100_000 if os.environ.get("HPCDP_TEST_THOROUGH") else 5_000
TOKENS = [
    '"',
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    "0",
    "-1",
    "1e999",
    "null",
    "true",
    "NaN",
    "\\u0000",
    "../",
    "[[[[",
    "\xff",
]
TOKENS += ['"tensor"', '"ranks"', '"dict"', '"float"', '"float64"', '"object"', "9" * 30, "1" * 5000]


def state(world):
    return {
        "a": np.arange(6.0),
        "b": [Sharded((2, 3), np.dtype("f4"), [Part(3 * world.rank, np.arange(3, dtype="f4"))]), (1, None, "x")],
        "own": PerRank({"rng": 3, "nan": float("nan")}),
        5: np.float16(3),
    }


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")

    def one(world):
        with Manager(path, world, compression=request.param) as manager:
            manager.save(3, state(world), metrics={"loss": 1.5}, config={"lr": 0.1})

    thread_comm.run(2, one)
    return path / "step-0000000003"


def mutated(content: bytes, random: random.Random) -> bytes:
    torn = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        at, kind = random.randrange(len(torn)), random.randrange(6)
        if kind == 0:
            torn[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            torn[at] = random.choice(b'0123456789{}[]",:-.eEntf')
        elif kind == 2:
            del torn[at : at + random.choice((1, 1, 5, 40))]
        elif kind == 3:
            torn[at:at] = random.choice(TOKENS).encode("latin-1")
        elif kind == 4:  # a number becomes another
            digits = [i for i in range(max(0, at - 60), min(len(torn), at + 60)) if chr(torn[i]).isdigit()]
            if digits:
                one = random.choice(digits)
                torn[one : one + 1] = str(random.choice((0, 7, 9, 10**6, 2**31, 2**62, 2**63, 2**64))).encode()
        else:
            other = random.randrange(len(torn))
            torn[at:at] = torn[other : other + random.randrange(1, 40)]
    return bytes(torn)


def signed(body: bytes) -> bytes:
    return body + f'"crc32": "{zlib.crc32(body):08x}"}}\n'.encode()


def restores(content: bytes, path, world, into) -> str:
    """What becomes of it, as in `Manager.restore`."""
    try:
        found = manifest.parse(content, "here")
        filling = Filling(found, found.state, world, into, False, {})
        filling.read(path)
        filling.finish()
        return "restored"
    except (DataError, ConfigError) as error:
        assert str(error)
        return type(error).__name__


def peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.slow
@pytest.mark.parametrize("saved", [None], indirect=True)
def test_any_bytes_as_a_manifest(saved):
    content = (saved / "manifest.json").read_bytes()
    body = content[: content.rindex(b'"crc32"')]
    source, seen = random.Random(5), dict.fromkeys(("restored", "DataError", "ConfigError"), 0)

    def one(world):
        into = state(world)
        before = peak_nbytes()
        for number in range(MUTATIONS):
            torn = mutated(body, source)
            content = signed(torn) if number % 50 else torn
            seen[restores(content, saved, world, None if number % 2 else into)] += 1
        return peak_nbytes() - before

    assert thread_comm.run(1, one)[0] < 50e6
    assert sum(seen.values()) == MUTATIONS and min(seen["restored"], seen["DataError"]) > MUTATIONS / 100, seen


@pytest.mark.slow
@pytest.mark.parametrize("saved", [None, "lzf"], indirect=True)
def test_any_bytes_as_a_shard(saved):
    """What is read has the checksum that the manifest says, whatever HDF5 makes of the rest."""
    path, source = saved / "shard-00000.h5", random.Random(6)
    content, found = path.read_bytes(), manifest.read(saved)
    whole = {name: np.empty(tensor.count, tensor.stored_dtype) for name, tensor in found.tensors.items()}
    parts = [part for tensor in found.tensors.values() for part in tensor.parts if part.file == path.name]
    right, wrong = 0, 0
    for part in parts:
        with ShardReader(saved) as reader:
            reader.read(part, 0, whole[part.name][part.first : part.first + part.count])
    try:
        for number in range(MUTATIONS // 20):
            torn = bytearray(content)
            for _ in range(source.choice((1, 4, 100))):
                torn[source.randrange(len(torn))] = source.randrange(256)
            path.write_bytes(torn if number % 5 else torn[: source.randrange(len(torn))])
            part = source.choice(parts)
            out = np.empty(part.count, found.tensors[part.name].stored_dtype)
            try:
                with ShardReader(saved) as reader:
                    reader.read(part, 0, out)
            except DataError as error:
                wrong += 1
                assert str(path) in str(error) and part.dataset in str(error)
            else:
                right += 1
                assert out.tobytes() == whole[part.name][part.first : part.first + part.count].tobytes()
    finally:
        path.write_bytes(content)
    is_compressed = parts[0].offset is None  # of which HDF5 reads nothing unless all of the file is right
    assert wrong > MUTATIONS / 200 and (right == 0 if is_compressed else right > MUTATIONS / 200)


@pytest.mark.parametrize("saved", [None], indirect=True)
def test_what_is_signed_is_what_is_written(saved):
    content = (saved / "manifest.json").read_bytes()
    assert signed(content[: content.rindex(b'"crc32"')]) == content
    assert json.loads(content)["step"] == 3
