"""HDF5 files from outside: those that HDF5 follows for ever, and those that lead to other files."""

import base64
import contextlib
import os
import signal
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from raises import raises

from hpcdp.core import hdf5
from hpcdp.core.hdf5 import read_arrays, write_arrays
from hpcdp.data import HDF5Dataset
from hpcdp.errors import DataError

ENDLESS = zlib.decompress(
    base64.b85decode(
        "c-rllu};G<5QfioQcMscVJTuEBNJj_U@M}54pkcg10xb3Au)hJpl+<NvGW4F0&l=mz@wBncURdS7+5-R-}2||%h_@MSc+c;{e$If"
        "Jp+fekU$PTQ=(oAW9~mARiw|P@0#0H+ef!ULG|OjlcTC~+0zIfXFEX+XD9p@2Gw5e^ps-u)29ye9!V#WFMEF+S3w7BD2_K#H8y0F"
        "cR?D*rkSbBEXoZ)3zyKf(0!u*6l~kC4HmTI@WeEi-V>}+=%VCn=^Eg6F7M%ZH0~?VJUJ-M@A>?_PEzr3=&LmH6*^j}&{x^aM|qo?"
        "TcEY?h5pg(AFN}zAk@*wud?{UjKlr$P<bCJ@0Ys}ZJ_rz4|nI6TUR^H)@HnRG-nupf4mjZIOU40wIB$BAP9mW2!bHY8~%OQ-Y>m_"
        "j@^Ne?>eLlq<jvzNcsa!$T}S"
    )
)
"""A file whose data set v HDF5 does not come to the end of; x holds 10 numbers."""


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch) -> Path:
    """An empty folder of what visits have found, and no memory of any."""
    monkeypatch.setattr(hdf5, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(hdf5, "_visited", set())
    monkeypatch.setattr(hdf5, "LIMIT_S", 0.1)
    return tmp_path / "hdf5"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "good.h5", "w") as file:
        file["x"], file["y"] = np.arange(3.0), np.arange(3)
    return tmp_path / "good.h5"


def visits(monkeypatch) -> list[str]:
    """The names of files that are visited from now on."""
    found, visit = [], hdf5._child.visit

    def noted(asked):
        found.append(os.path.basename(asked[0]))
        return visit(asked)

    monkeypatch.setattr(hdf5._child, "visit", noted)
    return found


def test_a_file_that_hdf5_follows_for_ever_is_one_line(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "endless.h5"
    path.write_bytes(ENDLESS)
    visited = visits(monkeypatch)
    for names in (("v", "x"), ("x", "gone")):  # of the second all objects are visited
        with raises(DataError, operation="read HDF5", where=path, expected="HDF5", got=0.1) as caught:
            HDF5Dataset(path, *names)
        assert len(str(caught.value).splitlines()) == 1
    with contextlib.closing(HDF5Dataset(path, "x", "x")) as dataset:  # what is sound of it can be read
        assert len(dataset) == 10
    assert len(visited) == 3
    # as other ranks of the node find it: nobody tries again at once
    with raises(DataError, operation="read HDF5", where=path, expected="HDF5", got=0.1):
        HDF5Dataset(path, "v", "x")
    assert len(visited) == 3


def test_a_version_of_a_file_is_visited_once_a_node(good: Path, kept: Path, monkeypatch) -> None:
    visited = visits(monkeypatch)
    for _ in range(2):
        HDF5Dataset(good).close()
        hdf5._visited.clear()  # as in another process
    assert visited == ["good.h5"]
    with h5py.File(good, "a") as file:
        file["z"] = 1
    HDF5Dataset(good).close()
    assert visited == ["good.h5"] * 2
    old = next(kept.iterdir())
    os.utime(old, (0, 0))
    HDF5Dataset(good, "y", "x").close()
    assert len(visited) == 3 and not old.exists() and len(list(kept.iterdir())) == 2
    write_arrays(good, {"x": np.zeros(2)})
    read_arrays(good, {"x": ((2,), "float64")})
    assert len(visited) == 3


def test_a_child_that_was_ended_is_started_again(good: Path, tmp_path: Path) -> None:
    HDF5Dataset(good).close()
    process = hdf5._child._process
    assert process is not None
    process.kill()
    process.wait()
    HDF5Dataset(good, "y", "x").close()
    assert hdf5._child._process is not process


def test_without_a_child_files_are_read_with_a_warning(good: Path, monkeypatch) -> None:
    for program, says in (("/nowhere/python", "No such file"), ("/bin/false", "fails to start")):
        monkeypatch.setattr(hdf5, "_child", hdf5._Child())
        monkeypatch.setattr(hdf5, "_visited", set())
        monkeypatch.setattr("sys.executable", program)
        with pytest.warns(UserWarning, match=f"without a visit by a child process.*{says}"):
            HDF5Dataset(good).close()


def test_a_crash_of_hdf5_is_one_line(good: Path, monkeypatch) -> None:
    child = hdf5._Child()
    monkeypatch.setattr(hdf5, "_child", child)
    started = child._started

    def crashed():
        process = started()
        process.send_signal(signal.SIGSEGV)
        return process

    monkeypatch.setattr(child, "_started", crashed)
    with raises(DataError, operation="read HDF5", where=good, got="SIGSEGV"):
        HDF5Dataset(good)


def leading_outside(folder: Path) -> dict[str, str]:
    """Names of data sets of ``folder/in.h5`` that lie in another file, and what is said of each."""
    with h5py.File(folder / "other.h5", "w") as file:
        file["x"] = np.arange(3.0)
    (folder / "raw").write_bytes(np.arange(3.0).tobytes())
    of_other, of_own = (h5py.VirtualLayout((3,), "f8") for _ in range(2))
    of_other[:] = h5py.VirtualSource("other.h5", "x", (3,))
    of_own[:] = h5py.VirtualSource(".", "soft", (3,))
    with h5py.File(folder / "in.h5", "w") as file:
        file["y"] = np.arange(3)
        file.create_dataset("storage", (3,), "f8", external=[(str(folder / "raw"), 0, 24)])
        file["link"] = h5py.ExternalLink("other.h5", "x")
        file["group"] = h5py.ExternalLink("other.h5", "/")
        file["soft"] = h5py.SoftLink("/inner/soft")
        file["inner/soft"] = h5py.SoftLink("deep/x")
        file["inner/deep"] = h5py.SoftLink("/group")
        file.create_virtual_dataset("view", of_other)
        file.create_virtual_dataset("view of own", of_own)
    link = "a link to the file other.h5"
    return {"storage": f"elements in the file {folder / 'raw'}", "link": link, "group/x": link, "soft": link,
            "inner/soft": link, "view": "a view of the file other.h5", "view of own": link}  # fmt: skip


def test_what_lies_in_another_file_is_read_where_that_is_asked_for(tmp_path: Path) -> None:
    for name, says in leading_outside(tmp_path).items():
        with raises(DataError, operation="read HDF5", where=f"{tmp_path}/in.h5:{name}") as caught:
            HDF5Dataset(tmp_path / "in.h5", name, "y")
        assert caught.value.got == says  # the line may be cut
        with raises(DataError, operation="read HDF5", where=f"{tmp_path}/in.h5:{name}"):
            read_arrays(tmp_path / "in.h5", {name: ((3,), "float64")})
        with contextlib.closing(HDF5Dataset(tmp_path / "in.h5", name, "y", external=True)) as dataset:
            np.testing.assert_array_equal(dataset[:][0], np.arange(3.0))


def test_a_link_is_refused_before_what_it_leads_to_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.h5")  # whoever opens it waits for ever
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["x"], file["y"] = h5py.ExternalLink(str(tmp_path / "pipe.h5"), "x"), np.arange(3)
        file["a"], file["b"] = h5py.SoftLink("b"), h5py.SoftLink("a")
    with raises(DataError, operation="read HDF5", where=f"{tmp_path}/in.h5:x", got="pipe.h5"):
        HDF5Dataset(tmp_path / "in.h5")
    with raises(DataError, operation="read HDF5", where=tmp_path / "in.h5"):
        HDF5Dataset(tmp_path / "in.h5", "a", "y")


def test_views_of_the_file_itself_are_no_other_files(tmp_path: Path) -> None:
    layout = h5py.VirtualLayout((4,), "f8")
    for half in range(2):
        layout[2 * half : 2 * half + 2] = h5py.VirtualSource(".", f"half {half}", (2,))
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["half 0"], file["half 1"], file["y"] = np.zeros(2), np.ones(2), np.arange(4)
        file.create_virtual_dataset("x", layout)
    with contextlib.closing(HDF5Dataset(tmp_path / "in.h5")) as dataset:
        np.testing.assert_array_equal(dataset[:][0], [0, 0, 1, 1])


def leading_to(pipe: Path, folder: Path) -> list[str]:
    """Names of data sets of ``folder/in.h5`` for which HDF5 would open ``pipe``."""
    view, view_of_storage = (h5py.VirtualLayout((3,), "f8") for _ in range(2))
    view[:] = h5py.VirtualSource(str(pipe), "x", (3,))
    view_of_storage[:] = h5py.VirtualSource("between.h5", "storage", (3,))
    rows = h5py.h5s.create_simple((0,), (h5py.h5s.UNLIMITED,))
    rows.select_hyperslab((0,), (h5py.h5s.UNLIMITED,), (3,), (3,))
    numbered = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    numbered.set_virtual(rows, b"numbered-%b.h5", b"x", h5py.h5s.create_simple((3,)))
    with h5py.File(folder / "between.h5", "w") as file:
        file.create_dataset("storage", (3,), "f8", external=[(str(pipe), 0, 24)])
        file["link"] = h5py.ExternalLink(str(pipe), "x")
    with h5py.File(folder / "numbered-0.h5", "w") as file:
        file["x"] = np.arange(3.0)
    (folder / "numbered-1.h5").symlink_to(pipe)
    with h5py.File(folder / "in.h5", "w") as file:
        file["y"] = np.arange(3)
        file.create_dataset("storage", (3,), "f8", external=[(str(pipe), 0, 24)])
        file["link"] = h5py.ExternalLink(str(pipe), "x")
        file["link to a link"] = h5py.ExternalLink("between.h5", "link")
        file["link to storage"] = h5py.ExternalLink("between.h5", "storage")
        file.create_virtual_dataset("view", view)
        file.create_virtual_dataset("view of storage", view_of_storage)
        h5py.h5d.create(file.id, b"numbered view", h5py.h5t.NATIVE_DOUBLE, rows, numbered)
        return [name for name in file if name != "y"]


def test_other_files_are_opened_only_if_they_are_regular(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.h5")  # whoever opens it waits for ever
    for name in leading_to(tmp_path / "pipe.h5", tmp_path):
        with raises(DataError, operation="read HDF5", where=f"{tmp_path}/in.h5:{name}"):
            HDF5Dataset(tmp_path / "in.h5", name, "y", external=True)
