"""Files that earlier versions have written, as `write.py` does: values are what they were, and training goes on."""

import contextlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import write
from write import CASES, EXPORTS, FURTHER_STEPS, STEPS

import hpcdp
from hpcdp import autograd, checkpoint, nn
from hpcdp.core.environment import launched_ranks

HERE = Path(__file__).parent
ARCHIVES = sorted((HERE / "data").glob("*.tar.xz"))
LAUNCHED = ("OMPI_", "PMI", "PRTE", "HPCDP_TEST_REPORT")
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHED)}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Sums of other processors, and of other numbers of ranks, round otherwise."""
WEIGHTS_OF = "momentum-3-ranks"


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def unpacked(request):
    """An archive of `data/` in a folder that all ranks of this run share."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if request.config.getoption("--only-mpi"):
            folder = hpcdp.init().comm.allgather_json(folder)[0]
        folder = Path(folder)
        if not request.config.getoption("--only-mpi") or hpcdp.init().rank == 0:
            with tarfile.open(request.param) as archive:
                safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from 3.11.4 on
                archive.extractall(folder, **safely)
        if request.config.getoption("--only-mpi"):
            hpcdp.init().barrier()
        yield folder
        if request.config.getoption("--only-mpi"):
            hpcdp.init().barrier()  # others may still read


def expected_of(path):
    """The values when the file was written, and after further steps."""
    with np.load(path) as file:
        return [
            {name.removeprefix(f"{when}/"): file[name] for name in file.files if name.startswith(f"{when}/")}
            for when in ("saved", "later")
        ]


def require_close(values, expected, **tolerance):
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, err_msg=name, **tolerance)


def cases():
    """Return the names of cases: all of them on up to 3 ranks, and on 4 only that which 4 ranks have saved."""
    is_long = launched_ranks() == 4
    return [
        pytest.param(name, marks=pytest.mark.thorough if is_long and case.ranks != 4 else ())
        for name, case in CASES.items()
    ]


@pytest.mark.mpi
@pytest.mark.parametrize("name", cases())
def test_training_goes_on(name, unpacked):
    case, world = CASES[name], hpcdp.init()
    pytest.importorskip(case.needs)
    if case.goes_on == "alone" and world.size > 1:
        pytest.skip("a store of one process")
    saved, later = expected_of(unpacked / name / "expected.npz")
    run = case.make(world)
    if name != "loose":  # the values that are compared come from the file
        assert any(not np.array_equal(value, saved[key]) for key, value in run.values().items())
    is_alike = (world.size, world.local_size) == (case.ranks, case.per_node or case.ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # last bits may differ on another processor, and it is another layout
        if case.manager is None:
            run.load_states(unpacked / name / "states", saved)
        else:
            with checkpoint.Manager(unpacked / name, world, **case.manager) as manager:
                restored = manager.restore(into=run.state)
            assert restored.step == STEPS
            if isinstance(run, write.Training):
                named = [restored.state[key] for key in ("epoch", "note", "losses")]
                assert named == [3, "as it was", [2.5, 1.25]]
    if isinstance(run, write.Loose):
        run.restored()
        run.rows = saved["rows"]
        wanted = {1: [True, None, 2**70], "of": (1.5, float("inf"), "text")}
        assert restored.state["numbers"] == wanted
        assert restored.state["own"] == {"of": world.rank}
        assert restored.kept == ([] if is_alike else ["own"])
    require_close(run.values(), saved, rtol=0, atol=0)
    if case.goes_on == "anywhere" or (case.goes_on != "never" and is_alike):
        for number in range(STEPS, STEPS + FURTHER_STEPS):
            run.step(number)
        require_close(run.values(), later, **(CLOSE if name != "half" else {"rtol": 2e-3, "atol": 1e-3}))


@pytest.mark.thorough
def test_training_goes_on_over_nodes():
    """What two virtual nodes have saved: the ranks of this run are all of one node."""
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--env", "HPCDP_RANKS_PER_NODE=1", "--"]
    pytest_of_ranks = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        "--with-mpi",
        "--only-mpi",
    ]
    done = subprocess.run(
        [*command, *pytest_of_ranks, __file__, "-k", "two-nodes or node-files"],
        cwd=HERE.parents[1], env=ENVIRONMENT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{2 * len(ARCHIVES)} passed" in done.stdout


@pytest.mark.parametrize("name", EXPORTS)
def test_exported_networks_compute_what_they_did(name, unpacked, tmp_path):
    with np.load(unpacked / "exports" / f"{name}-expected.npz") as file:
        x, y = file["x"], file["y"]
    loaded = nn.SymbolBlock.load(unpacked / "exports" / name)
    np.testing.assert_allclose(loaded(x).asnumpy(), y, **CLOSE)
    np.testing.assert_allclose(loaded(x[:1]).asnumpy(), y[:1], **CLOSE)
    net, _ = EXPORTS[name]()
    with autograd.record():
        net(x)  # running statistics move, as before the export
    for module in (net, loaded):  # gradients are those of the network
        with autograd.record(train_mode=False):
            out = module(x)
        out.backward()
    gradients = {param.name: param.grad for param in net.parameters()}
    assert gradients.keys() == {param.name for param in loaded.parameters()}
    for param in loaded.parameters():
        np.testing.assert_allclose(np.asarray(param.grad), np.asarray(gradients[param.name]), **CLOSE)
    loaded.hybridize()
    loaded(x)
    loaded.export(tmp_path / name)
    np.testing.assert_allclose(nn.SymbolBlock.load(tmp_path / name)(x).asnumpy(), y, **CLOSE)


def weights(unpacked):
    """Return the parameters that were exported for other programs."""
    saved, _ = expected_of(unpacked / WEIGHTS_OF / "expected.npz")
    return {name: value for name, value in saved.items() if name != "step_count"}


def test_exported_weights_are_those_of_the_checkpoint(unpacked):
    saved = weights(unpacked)
    net = write.plain()
    with np.load(unpacked / "weights" / "net.npz") as file:
        net.load_state_dict({name: file[name] for name in file.files})
    assert all(np.array_equal(param.asnumpy(), saved[name]) for name, param in net.named_parameters())
    with h5py.File(unpacked / WEIGHTS_OF / f"step-{STEPS:010d}" / "index.h5") as file:
        assert all(np.array_equal(file[f"net/{name}"][...], value) for name, value in saved.items())


def test_weights_for_others_are_those_of_the_checkpoint(unpacked):
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.numpy")
    saved = weights(unpacked)
    of_torch = {name: value.numpy() for name, value in torch.load(unpacked / "weights" / "net.pt").items()}
    require_close(of_torch, saved, rtol=0, atol=0)
    require_close(safetensors.load_file(unpacked / "weights" / "net.safetensors"), saved, rtol=0, atol=0)


def hpcdp_command(*arguments):
    command = [sys.executable, "-m", "hpcdp.cli", *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def epochs_of(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    names = ("step", "epoch", "loss", "accuracy", "samples", "learning_rate", "test_loss", "test_accuracy")
    return [{name: line[name] for name in names} for line in lines if line["kind"] == "epoch"]


def test_checkpoints_are_whole(unpacked):
    names = [name for name, case in CASES.items() if case.manager is not None]
    hpcdp_command("checkpoint", "verify", *(unpacked / name for name in names))
    entries = json.loads(hpcdp_command("checkpoint", "ls", unpacked / WEIGHTS_OF, "--json"))
    assert json.dumps(entries).count('"loss": 0.5') == 1


@pytest.mark.thorough
def test_a_run_goes_on_and_is_repeated_from_its_config(unpacked, tmp_path):
    expected = epochs_of(unpacked / "train" / "longer.jsonl")
    assert [line["epoch"] for line in expected] == [1, 2]
    write.tiny_mnist(tmp_path)
    repeated = ("--config", unpacked / "train" / "run" / "config.toml", "--run-dir", tmp_path / "repeated")
    hpcdp_command("train", *repeated, "--data-dir", tmp_path)
    hpcdp_command("train", "--resume", unpacked / "train" / "run", "--epochs", 2, "--data-dir", tmp_path)
    for found, wanted in (
        (epochs_of(tmp_path / "repeated" / "metrics.jsonl"), expected[:1]),
        (epochs_of(unpacked / "train" / "run" / "metrics.jsonl"), expected),
    ):
        assert [line.keys() for line in found] == [line.keys() for line in wanted]
        for line, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose([*line.values()], [*other.values()], **CLOSE)
