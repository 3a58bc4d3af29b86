"""What other programs read from an exported checkpoint is what was saved."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from full_disk import files_of_at_most
from raises import raises
from saved import Bfloat16, arrays, flip, save

from hpcdp import cli
from hpcdp.checkpoint import PerRank, inspect, manifest
from hpcdp.checkpoint.inspect import WRITERS, choose_tensors, export
from hpcdp.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(tmp_path_factory.mktemp("saved"), ranks=3)[0]


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


def torch_writer():
    from hpcdp.torch import checkpoint_adapters

    return checkpoint_adapters.write


def test_numpy_reads_an_npz(path, tmp_path):
    told = []
    nbytes = export(choose_tensors(path), tmp_path / "all.npz", WRITERS["npz"], tell=told.append)
    assert nbytes == (tmp_path / "all.npz").stat().st_size
    with np.load(tmp_path / "all.npz", allow_pickle=False) as file:
        assert set(file.files) == {f"net/{name}" for name in arrays()}
        for name, expected in arrays().items():
            if name == "brain":
                expected = np.array([[1.0, -2.0], [3.0, 0.15625]], np.float32)
            assert file[f"net/{name}"].dtype == expected.dtype
            np.testing.assert_array_equal(file[f"net/{name}"], expected, strict=True)
    assert sum(told) == manifest.read(path).nbytes - 72  # without what each rank has for itself
    assert [each.name for each in tmp_path.iterdir()] == ["all.npz"]


def test_safetensors_reads_a_safetensors_file(path, tmp_path):
    safe_numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    export(choose_tensors(path, "net"), tmp_path / "net.safetensors", WRITERS["safetensors"])
    with safe_numpy.safe_open(tmp_path / "net.safetensors", "np") as file:
        assert set(file.keys()) == set(arrays())
        assert file.metadata() == {"format": "pt", "step": "100"}
        assert file.get_slice("brain").get_dtype() == "BF16"
        for name, expected in arrays().items():
            if name != "brain":
                np.testing.assert_array_equal(file.get_tensor(name), expected)


def test_pytorch_reads_the_bfloat16_of_safetensors(path, tmp_path, torch):
    safe_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    export(choose_tensors(path, "net"), tmp_path / "net.safetensors", WRITERS["safetensors"])
    brain = safe_torch.load_file(tmp_path / "net.safetensors")["brain"]
    assert brain.dtype == torch.bfloat16
    assert brain.tolist() == [[1.0, -2.0], [3.0, 0.15625]]


def test_pytorch_reads_a_pt_file_nested_as_it_was_saved(path, tmp_path, torch):
    export(choose_tensors(path), tmp_path / "all.pt", torch_writer())
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    assert set(state) == {"net", "optimizer"}
    assert state["optimizer"].pop("loss") != 0
    assert state["optimizer"] == {"epoch": 3, "lr": 0.5, "milestones": [1, 2], "name": "sgd"}
    assert state["net"]["brain"].dtype == torch.bfloat16
    assert state["net"]["brain"].tolist() == [[1.0, -2.0], [3.0, 0.15625]]
    for name, expected in arrays().items():
        if name != "brain":
            np.testing.assert_array_equal(state["net"][name].numpy(), expected)


@pytest.mark.thorough
def test_a_part_is_the_state_dict_of_a_module_and_of_its_optimizer(tmp_path, torch):
    torch.manual_seed(1)

    def parts():
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        return module, torch.optim.Adam(module.parameters(), lr=0.25)

    module, optimizer = parts()
    module(torch.randn(8, 3)).sum().backward()
    optimizer.step()

    import hpcdp.torch  # noqa: F401

    (path,) = save(tmp_path / "saved", ranks=1, state=lambda step, world: {"net": module, "optimizer": optimizer})
    other, its = parts()
    for name, into in (("net", other), ("optimizer", its)):
        export(choose_tensors(path, name), tmp_path / f"{name}.pt", torch_writer())
        into.load_state_dict(torch.load(tmp_path / f"{name}.pt", weights_only=True))
    assert all(
        torch.equal(a, b) for a, b in zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    )
    (group,) = its.state_dict()["param_groups"]
    assert group.pop("param_names") == ["0.weight", "0.bias", "1.weight", "1.bias"]  # as the module in the state has
    assert [group] == optimizer.state_dict()["param_groups"]
    assert torch.equal(its.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_names(tmp_path):
    x = np.ones(2)
    state = {"net": {"a/b": x, "": x, "per%": x, "c": {"d": x, 1: x}, "rng": PerRank(x)}, "netto": x, "n": 1}
    (path,) = save(tmp_path, state=lambda step, world: state)
    assert set(choose_tensors(path, "net").tensors) == {"a/b", "", "per%", "c/d", "c/1"}
    assert choose_tensors(path, "net").per_rank == ["net/rng"]
    assert set(choose_tensors(path, "net/c/").tensors) == {"d", "1"}
    assert set(choose_tensors(path, "net/c/d").tensors) == {"d"}
    assert choose_tensors(path).others == ["n"]
    with raises(ConfigError, operation="export", where="--name", got="ne"):
        choose_tensors(path, "ne")
    with raises(ConfigError, operation="export", where="--name n", expected="tensors"):
        choose_tensors(path, "n")


def test_what_is_there_stays(path, tmp_path):
    out = tmp_path / "x.npz"
    out.write_text("mine")
    with raises(ConfigError, operation="export", where=out, remedy="--overwrite"):
        export(choose_tensors(path), out, WRITERS["npz"])
    with raises(ConfigError, operation="export", where=tmp_path):
        export(choose_tensors(path), tmp_path, WRITERS["npz"], overwrite=True)
    assert out.read_text() == "mine"
    export(choose_tensors(path), out, WRITERS["npz"], overwrite=True)
    assert len(np.load(out).files) == len(arrays())


@pytest.mark.parametrize("is_there", [True, False])
def test_of_a_link_what_it_leads_to_is_replaced(is_there, path, tmp_path):
    (tmp_path / "large").mkdir()
    target, link = tmp_path / "large" / "x.npz", tmp_path / "x.npz"
    link.symlink_to("large/x.npz")
    if is_there:
        target.write_text("old")
    export(choose_tensors(path), link, WRITERS["npz"], overwrite=is_there)
    assert link.is_symlink() and len(np.load(target).files) == len(arrays())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["large", "x.npz"]
    inside = tmp_path / "inside.npz"
    inside.symlink_to(path / "x.npz")
    with raises(ConfigError, operation="export", where=path / "x.npz"):
        export(choose_tensors(path), inside, WRITERS["npz"])


@pytest.mark.parametrize("kind", [*WRITERS, "pt"])
def test_others_may_read_what_the_umask_lets_them(kind, path, tmp_path):
    if kind != "npz":
        pytest.importorskip({"pt": "torch"}.get(kind, kind), reason="not installed")
    before = os.umask(0o027)
    try:
        export(choose_tensors(path), tmp_path / "out", torch_writer() if kind == "pt" else WRITERS[kind])
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640


def test_nothing_is_written_into_a_checkpoint(tmp_path):
    (path,) = save(tmp_path / "saved", ranks=1)
    before = sorted(path.iterdir())
    with raises(ConfigError, operation="export", where=path / "x.npz"):
        export(choose_tensors(path), path / "x.npz", WRITERS["npz"])
    assert sorted(path.iterdir()) == before


def test_a_name_that_an_archive_would_cut(tmp_path):
    (path,) = save(tmp_path, ranks=1, state=lambda step, world: {"a": np.ones(2), "a\0b": np.zeros(2)})
    with raises(ConfigError, operation="export", where="'a\\x00b'", expected="NUL"):
        export(choose_tensors(path), tmp_path / "x.npz", WRITERS["npz"])
    assert not (tmp_path / "x.npz").exists()


@pytest.mark.parametrize("kind", [*WRITERS, "pt"])
def test_a_damaged_checkpoint_is_not_exported(kind, tmp_path):
    if kind != "npz":
        pytest.importorskip({"pt": "torch"}.get(kind, kind), reason="not installed")
    (path,) = save(tmp_path / "saved", ranks=1)
    part = manifest.read(path).tensors["net/weight"].parts[0]
    flip(path / part.file, part.offset)
    out = tmp_path / "out"
    out.write_text("mine")
    with raises(DataError, operation="export", where=f"{path}/shard-00000.h5, net/weight"):
        export(choose_tensors(path), out, torch_writer() if kind == "pt" else WRITERS[kind], overwrite=True)
    assert out.read_text() == "mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "saved"]


@pytest.mark.parametrize("limit", [100, 20_000, 1_000_000])
@pytest.mark.parametrize("kind", [*WRITERS, "pt"])
def test_a_full_disk_is_one_line(kind, limit, path, tmp_path):
    if kind != "npz":
        pytest.importorskip({"pt": "torch"}.get(kind, kind), reason="not installed")
    out = tmp_path / "out"
    with files_of_at_most(limit), raises(DataError, operation="export", where=out) as caught:
        export(choose_tensors(path), out, torch_writer() if kind == "pt" else WRITERS[kind])
    assert re.search("larger than the limit|File too large", str(caught.value.got)) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_export_has_left_is_taken_over(path, tmp_path):
    code = (
        "import os, signal, pathlib; from hpcdp.checkpoint.inspect import WRITERS, choose_tensors, export\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"tensors = choose_tensors(pathlib.Path({str(path)!r}))\n"
        f"export(tensors, pathlib.Path({str(tmp_path / 'out')!r}), WRITERS['npz'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == -9 and [each.name for each in tmp_path.iterdir()] == ["out.part"]
    (tmp_path / "out.part" / ".tmp-of-a-writer").write_text("torn")
    nbytes = export(choose_tensors(path), tmp_path / "out", WRITERS["npz"])
    assert nbytes == (tmp_path / "out").stat().st_size > 1000 and [each.name for each in tmp_path.iterdir()] == ["out"]


def test_two_exports_to_one_file_do_not_tear_each_other(path, tmp_path):
    out, said = tmp_path / "x.npz", []

    def writer(chosen, torn, tell):
        with pytest.raises(DataError) as caught:
            export(choose_tensors(path), out, WRITERS["npz"])
        said.append(caught.value)
        WRITERS["npz"](chosen, torn, tell)

    export(choose_tensors(path), out, writer)
    assert len(np.load(out).files) == len(arrays())
    (error,) = said
    assert str(error).startswith("export [") and "]: expected no other job that saves here, got process " in str(error)
    assert str(error.where) == f"{out}.part/writer.lock"  # the line may be cut
    assert [each.name for each in tmp_path.iterdir()] == ["x.npz"]


def test_a_file_that_has_come_meanwhile_stays(path, tmp_path, monkeypatch):
    out, made = tmp_path / "x.npz", inspect.WriterLock

    def late(*arguments):
        out.write_text("mine")
        return made(*arguments)

    monkeypatch.setattr(inspect, "WriterLock", late)
    with raises(ConfigError, operation="export", where=out):
        export(choose_tensors(path), out, WRITERS["npz"])
    assert out.read_text() == "mine" and [each.name for each in tmp_path.iterdir()] == ["x.npz"]


def test_a_file_of_the_name_of_the_folder_beside_stays(path, tmp_path):
    (tmp_path / "x.npz.part").write_text("mine")
    with raises(DataError, operation="export", where=tmp_path / "x.npz.part"):
        export(choose_tensors(path), tmp_path / "x.npz", WRITERS["npz"])
    assert (tmp_path / "x.npz.part").read_text() == "mine"


def test_what_is_no_plain_file_is_not_replaced(path, tmp_path):
    out = tmp_path / "x.npz"
    os.mkfifo(out)
    with raises(ConfigError, operation="export", where=out):
        export(choose_tensors(path), out, WRITERS["npz"], overwrite=True)
    assert out.is_fifo()


def test_the_name_that_safetensors_has_for_itself(tmp_path):
    (path,) = save(tmp_path, state=lambda step, world: {"net": {"__metadata__": np.ones(2)}})
    with raises(ConfigError, operation="export", where="__metadata__", remedy="--format"):
        export(choose_tensors(path, "net"), tmp_path / "x.safetensors", WRITERS["safetensors"])
    assert not (tmp_path / "x.safetensors").exists()


def test_a_file_that_cannot_be_written(path, tmp_path):
    with raises(DataError, operation="export", where=tmp_path / "no/x.npz"):
        export(choose_tensors(path), tmp_path / "no" / "x.npz", WRITERS["npz"])


def test_dtypes_that_a_format_does_not_have(tmp_path, torch):
    (path,) = save(tmp_path, state=lambda step, world: {"x": np.ones(2, np.longdouble), "y": np.ones(2, complex)})
    with raises(ConfigError, operation="export", where="x", expected="safetensors", remedy="--format"):
        export(choose_tensors(path), tmp_path / "x.safetensors", WRITERS["safetensors"])
    with raises(ConfigError, operation="export", where="x", expected="PyTorch", remedy="--format"):
        export(choose_tensors(path), tmp_path / "x.pt", torch_writer())
    assert cli.main(["checkpoint", "export", str(path), str(tmp_path / "x.pt")]) == 2  # as for the others


def test_a_missing_package_is_one_line_with_the_remedy(path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with raises(ConfigError, operation="export", remedy="'hpcdp[safetensors]'"):
        export(choose_tensors(path), tmp_path / "x.safetensors", WRITERS["safetensors"])
    code = (
        "import sys; sys.modules['torch'] = None; from hpcdp import cli\n"
        f"sys.exit(cli.main(['checkpoint', 'export', {str(path)!r}, {str(tmp_path / 'x.pt')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'hpcdp[torch]'" in done.stderr


def test_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect, "PIECE_NBYTES", 1 << 20)
    x = np.arange(1_000_001, dtype=np.float64)
    (path,) = save(tmp_path, state=lambda step, world: {"x": x, "brain": Bfloat16(x)})
    export(choose_tensors(path), tmp_path / "x.npz", inspect.write_npz)
    with np.load(tmp_path / "x.npz") as file:
        np.testing.assert_array_equal(file["x"], x)
        assert file["brain"].shape == x.shape
