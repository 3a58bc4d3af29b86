from pathlib import Path

import pytest
from raises import raises

from hpcdp import data
from hpcdp.errors import DataError


@pytest.mark.parametrize("read", [data.read_csv, data.read_cifar10, data.HDF5Dataset, data.read_idx])
def test_a_file_that_the_system_does_not_look_for_is_told_with_its_reason(read, tmp_path: Path) -> None:
    with raises(DataError, where=tmp_path / ("x" * 300)):
        read(tmp_path / ("x" * 300))
    with raises(DataError, where=tmp_path / "missing"):
        read(tmp_path / "missing")


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_a_folder_that_the_system_does_not_look_into_is_told_with_its_reason(name: str, tmp_path: Path) -> None:
    with raises(DataError, operation="data folder", where=tmp_path / ("x" * 300) / name):
        data.load(name, root=tmp_path / ("x" * 300))


def test_records_of_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "batch.bin"
    path.write_bytes(bytes(3073))

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("numpy.fromfile", refused)  # which root may
    with raises(DataError, operation="read CIFAR-10", where=path):
        data.read_cifar10(path)
