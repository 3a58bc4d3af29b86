import io
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
from raises import raises

from hpcdp.data import catalog, read_cifar10
from hpcdp.errors import ConfigError, DataError


def records(count: int, seed: int) -> tuple[bytes, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count, np.uint8)
    images = rng.integers(0, 256, (count, 3, 32, 32), np.uint8)
    return b"".join(bytes([y]) + x.tobytes() for x, y in zip(images, labels, strict=True)), images, labels


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def test_files_one_after_the_other(tmp_path: Path) -> None:
    first, second = records(4, 1), records(3, 2)
    (tmp_path / "a.bin").write_bytes(first[0])
    (tmp_path / "b.bin").write_bytes(second[0])
    images, labels = read_cifar10(tmp_path / "a.bin", tmp_path / "b.bin")
    np.testing.assert_array_equal(images, np.concatenate([first[1], second[1]]))
    np.testing.assert_array_equal(labels, np.concatenate([first[2], second[2]]))
    assert images.dtype == labels.dtype == np.uint8


def test_no_file_at_all_is_refused() -> None:
    with raises(ConfigError, operation="read CIFAR-10", where="paths"):
        read_cifar10()


def test_faults(tmp_path: Path) -> None:
    path = tmp_path / "batch.bin"
    data = records(3, 0)[0]
    cases = (
        (data[:-1], {"expected": 3073, "got": 9218}),
        (b"", {"got": 0}),
        (b"\x0a" + data[1:], {"expected": [0, 9], "got": 10}),
    )
    for content, fields in cases:
        path.write_bytes(content)
        with raises(DataError, operation="read CIFAR-10", where=path, **fields):
            read_cifar10(path)
    with raises(DataError, operation="read CIFAR-10", where=tmp_path / "missing.bin"):
        read_cifar10(tmp_path / "missing.bin")


def test_unpacking_takes_the_six_files_and_nothing_else(tmp_path: Path) -> None:
    members = {
        f"cifar-10-batches-bin/{name}": records(1, i)[0]
        for i, name in enumerate(catalog.CIFAR10_TRAIN + catalog.CIFAR10_TEST)
    }
    evil = {"../outside.bin": b"x", "cifar-10-batches-bin/readme.html": b"y"}
    (tmp_path / "in").mkdir()
    catalog.unpack_cifar10(archive(tmp_path / "in" / catalog.CIFAR10_ARCHIVE, {**members, **evil}))
    assert not (tmp_path / "outside.bin").exists()
    names = {path.name for path in (tmp_path / "in").iterdir()}
    assert names == {catalog.CIFAR10_ARCHIVE, *catalog.CIFAR10_TRAIN, *catalog.CIFAR10_TEST}
    assert (tmp_path / "in" / "data_batch_3.bin").read_bytes() == records(1, 2)[0]


def test_archives_that_are_damaged_or_incomplete(tmp_path: Path) -> None:
    whole = archive(
        tmp_path / "a.tar.gz", {name: records(5, 0)[0] for name in catalog.CIFAR10_TRAIN + catalog.CIFAR10_TEST}
    ).read_bytes()
    for content in (whole[: len(whole) // 2], whole[:100], b"no archive", b""):
        (tmp_path / "b.tar.gz").write_bytes(content)
        with raises(DataError, operation="unpack CIFAR-10", where=tmp_path / "b.tar.gz"):
            catalog.unpack_cifar10(tmp_path / "b.tar.gz")
    with raises(DataError, operation="unpack CIFAR-10", where=tmp_path / "c.tar.gz", expected="data_batch_1.bin"):
        catalog.unpack_cifar10(archive(tmp_path / "c.tar.gz", {"test_batch.bin": b""}))
    link = tarfile.TarInfo("test_batch.bin")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(tmp_path / "d.tar.gz", "w:gz") as tar:
        tar.addfile(link)
    with raises(DataError, operation="unpack CIFAR-10", where=tar.name):
        catalog.unpack_cifar10(tmp_path / "d.tar.gz")


def test_a_folder_without_room_for_what_is_unpacked(tmp_path: Path) -> None:
    members = {name: records(5, 0)[0] for name in catalog.CIFAR10_TRAIN + catalog.CIFAR10_TEST}
    packed = archive(tmp_path / "a.tar.gz", members)
    program = (
        "import pathlib, resource, sys\n"
        "from hpcdp.data.catalog import unpack_cifar10\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
        "unpack_cifar10(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-B", "-c", program, str(packed)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    last = ended.stderr.splitlines()[-1]
    assert (
        f"[{tmp_path}]: expected a writeable folder with space for its files, got a file larger than the limit" in last
    )
    assert list(tmp_path.iterdir()) == [packed]
