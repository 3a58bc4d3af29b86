"""`hpcdp checkpoint` from outside: what it prints, and its exit status."""

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from saved import flip, save

from hpcdp import cli
from hpcdp.checkpoint import Manager, complete_steps, inspect, manifest
from hpcdp.checkpoint.complete_steps import WriterLock
from hpcdp.comm import thread_comm

COMMANDS = ("ls", "show", "verify", "diff", "export", "prune")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command in this process; its status, and what it has printed on stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TZ", "UTC")

    def run(*arguments):
        status = cli.main(["checkpoint", *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save(folder / "checkpoints", (100, 200, 300), metrics=lambda step: {"loss": 1 / step, "accuracy": step / 1000})
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved / "checkpoints", tmp_path / "copy")


def narrow(text):
    return max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_a_terminal_and_loads_neither_mpi_nor_numpy(name):
    code = (
        "import sys; from hpcdp import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'mpi4py', 'numpy', 'h5py', 'rich'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "checkpoint", *filter(None, [name]), "-h"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "80"}, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage: hpcdp checkpoint" in done.stdout
    assert narrow(done.stdout)


def test_ls(run, saved):
    status, out, _ = run("ls", saved)
    assert status == 0
    head, *lines = out.splitlines()
    assert head.split() == ["step", "written", "size", "ranks", "state", "metrics"]
    pattern = r" 200  \d{4}-\d\d-\d\d \d\d:\d\d  [\d.]+ MB      2  complete  loss 0.005, accuracy 0.2"
    assert re.fullmatch(pattern, lines[1])
    assert len(lines) == 3
    assert narrow(out)


def test_ls_names_damage_left_overs_and_who_saves(run, folder):
    flip(folder / "step-0000000100" / "manifest.json", 20)
    with open(folder / "step-0000000300" / "shard-00001.h5", "ab") as file:
        file.write(b"x" * 100)
    shutil.copytree(folder / "step-0000000200", folder / "step-0000000400.tmp")
    status, out, _ = run("ls", folder)
    assert status == 0
    assert narrow(out)
    lines = out.splitlines()
    assert "damaged" in lines[1] and "complete" not in lines[1]
    assert "manifest.json: a checksum that does not fit" in " ".join(lines[2].split())
    assert "complete" in lines[3]
    assert "damaged" in lines[4] and lines[5].startswith("    shard-00001.h5: expected ")
    assert lines[6].startswith("step-0000000400.tmp  ") and lines[6].endswith("left over, the next save removes it")
    assert len(lines) == 7
    lock = WriterLock(folder)
    try:
        out = run("ls", folder)[1]
    finally:
        lock.release()
    assert "being written, or left over" in out
    assert f"saving here: process {os.getpid()} of " in out
    assert "saving here" not in run("ls", folder)[1]


def test_a_save_that_had_its_name_but_no_commit_file_is_a_left_over(run, tmp_path):
    _, path = save(tmp_path, (1, 2), atomic_rename=False)
    (path / "committed").unlink()
    out = run("ls", tmp_path)[1]
    assert len(out.splitlines()) == 3
    assert out.splitlines()[2].startswith("step-0000000002  ") and "left over" in out
    assert "removed step-0000000002, left over" in run("prune", tmp_path, "--keep", "1")[1]
    assert not path.exists()


def test_ls_for_programs(run, saved):
    status, out, _ = run("ls", saved, "--json")
    seen = json.loads(out)
    assert status == 0
    assert [each["step"] for each in seen["checkpoints"]] == [100, 200, 300]
    assert seen["checkpoints"][0]["metrics"] == {"loss": 0.01, "accuracy": 0.1}
    assert seen["checkpoints"][0]["damage"] is None
    assert seen["writer"] is None and seen["left_over"] == []


def test_ls_of_one_checkpoint(run, saved, tmp_path, monkeypatch):
    path = saved / "checkpoints" / "step-0000000200"
    lines = run("ls", path)[1].splitlines()
    assert len(lines) == 2 and lines[1].split()[0] == "200" and "complete" in lines[1]
    monkeypatch.chdir(path)
    assert run("ls", ".")[1].splitlines() == lines
    shutil.copytree(path, tmp_path / "taken along")
    assert run("ls", tmp_path / "taken along")[1].splitlines() == lines
    (seen,) = json.loads(run("ls", path, "--json")[1])["checkpoints"]
    assert (seen["step"], seen["path"]) == (200, str(path))


def test_show_of_lists_that_hold_tensors(run, tmp_path):
    x = np.ones(2)
    state = {"a": [x, 5, (1, x)], "b": (1, (2, 3)), "c": [x], "d": [{"x": x}, 7]}

    def one(world):
        with Manager(tmp_path, world) as manager:
            manager.save(1, state)

    thread_comm.run(1, one)
    out = run("show", tmp_path)[1]
    assert "\nvalues\n  a  [(tensors), 5, (1, (tensors))]\n  b  (1, (2, 3))\n  d  [(tensors), 7]\n" in out


def test_show(run, saved, monkeypatch):
    monkeypatch.chdir(saved)
    saved = Path()
    status, out, _ = run("show", saved, "--step", "200")
    assert status == 0
    assert narrow(out)
    assert re.search(r"^step +200, written", out, re.M)
    assert re.search(r"^world +ranks 2, nodes 1$", out, re.M)
    assert re.search(r"^net/weight +\(700, 1000\) +float32 +2,800,000 +2$", out, re.M)
    assert re.search(r"^net/brain +\(2, 2\) +bfloat16 +8 +1$", out, re.M)
    assert "\n  optimizer\n    epoch  3\n    lr  0.5\n    loss  nan\n    milestones  [1, 2]\n" in out
    assert "\nconfig\n  model\n    depth  3\n" in out
    assert run("show", saved / "checkpoints" / "step-0000000200")[1] == run("show", saved, "--step", "200")[1]
    assert "step         300," in run("show", saved)[1]


def test_show_one_tensor(run, saved):
    _, out, _ = run("show", saved, "net/brain")
    assert out.splitlines() == [
        "tensor       net/brain",
        "shape        (2, 2) bfloat16, 8 bytes",
        out.splitlines()[2],
        "range        -2 to 3",
        "mean         0.539062, standard deviation 1.79319",
        "zeros        0 of 4",
        "NaNs         0, infinities 0",
    ]
    assert "parts        shard-0000" in out


def test_statistics_of_what_is_not_finite(run, tmp_path):
    x = np.array([np.nan, 1.0, 0.0, np.inf, 3.0, -np.inf])
    save(tmp_path, state=lambda step, world: {"x": x, "none": np.full(3, np.nan), "z": np.array([3 + 4j, 0])})
    out = run("show", tmp_path, "x")[1]
    assert "range        0 to 3\nmean         1.33333, standard deviation 1.24722\nzeros        1 of 6\n" in out
    assert "NaNs         1, infinities 2" in out
    assert "NaNs         3" in run("show", tmp_path, "none")[1]
    assert "range        0 to 5 of absolute values" in run("show", tmp_path, "z")[1]


def test_numbers_of_a_run_that_has_diverged(run, tmp_path, monkeypatch):
    x = np.array([0, 1, 1e200, -1e200, 1e308, 1e308])
    for step, values in ((1, x), (2, -x)):
        save(tmp_path, (step,), state=lambda step, world, values=values: {"x": values})
    monkeypatch.setattr(inspect, "PIECE_NBYTES", 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        status, out, error = run("show", tmp_path, "x")
        assert (status, error) == (0, "") and "range        -1e+308 to 1e+200\nmean " in out
        status, out, error = run("diff", *sorted(tmp_path.glob("step-*")), "--rtol", "1e-3")
        assert (status, error) == (1, "") and "x: 5 of 6 elements differ, by at most inf (relative inf)" in out


def test_show_what_lies_below_a_name(run, saved):
    out = run("show", saved, "net")[1]
    assert "net/weight" in out and "optimizer" not in out
    assert run("show", saved, "optimizer/lr")[1] == "values\n  lr  0.5\n"
    assert run("show", saved, "rng")[1].splitlines()[0].startswith("tensor")
    status, _, error = run("show", saved, "net/wieght")
    assert status == 2
    names = "a name of the state, which has net, optimizer, rng"
    assert error == f"hpcdp: show: expected {names}, got 'net/wieght'; did you mean 'net/weight'?\n"


def test_long_names_and_values_fit(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    long = "a_very_long_name_of_a_block" * 4
    state = {long: np.ones((2, 3)), "text": "x" * 200, "numbers": list(range(500)), "nested": [{"a": 1}, {"b": [1]}]}
    save(tmp_path, state=lambda step, world: state)
    out = run("show", ".")[1]
    assert narrow(out.replace(long, ""))
    assert long in out.splitlines()
    assert "numbers  500 values, 0 ... 499" in out


def test_names_break_no_line_and_do_nothing_to_a_terminal(run, tmp_path):
    odd = "a\nb\x1b[31m\u202e"
    told = r"a\nb\x1b[31m\u202e"
    for folder, value in (("a", 1.0), ("b", 2.0)):
        state = {odd: np.full(3, value), "v": {odd: value}}
        save(tmp_path / folder, state=lambda step, world, state=state: state, metrics=lambda step: {odd: 1.0})
    out = run("show", tmp_path / "a")[1]
    assert re.search(rf"^{re.escape(told)}  +\(3,\)  +float64  +24  +1$", out, re.M)
    assert f"\n  v\n    {told}  1.0\n" in out or f"\n  v  {{'{told}': 1.0}}\n" in out
    assert f"tensor       {told}\n" in run("show", tmp_path / "a", odd)[1]
    assert f"{told} 1\n" in run("ls", tmp_path / "a")[1].replace("\n    ", "")
    assert f"\n{told}: 3 of 3 elements differ" in run("diff", tmp_path / "a", tmp_path / "b")[1]
    part = manifest.read(tmp_path / "a" / "step-0000000100").tensors[odd].parts[0]
    flip(tmp_path / "a" / "step-0000000100" / part.file, part.offset)
    _, fault = run("verify", tmp_path / "a")[1].splitlines()
    assert r", a b\x1b[31m\u202e: expected checksum" in fault


def test_a_tensor_of_many_axes_widens_no_row(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path, state=lambda step, world: {"a": np.ones((1,) * 31 + (2,)), "b": np.ones((10, 200, 30))})
    out = run("show", ".")[1]
    assert narrow(out)
    assert re.search(r"^a +\(1, 1, .*, 1, \.\.\. 32 sizes\) +float64 +16 +1$", out, re.M)
    assert re.search(r"^b +\(10, 200, 30\) +float64", out, re.M)
    assert "(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1," in run("show", ".", "a")[1]


@pytest.mark.parametrize("command", [["show"], ["export", "net.npz", "--name"]])
def test_a_name_with_a_slash_is_found_by_what_it_was(command, run, tmp_path):
    save(tmp_path, state=lambda step, world: {"a": {"with/slash": {"x": np.ones(2), "50%": np.ones(2)}}})
    for name in ("a/with/slash", "a/with/slash/50%"):
        status, _, error = run(command[0], tmp_path, *command[1:], name)
        key = name.replace("with/slash", "with%2Fslash").replace("50%", "50%25")
        assert status == 2 and error.endswith(f"got {name!r}; did you mean {key!r}?\n")


def test_verify(run, saved, folder):
    status, out, _ = run("verify", saved)
    assert status == 0
    assert len(out.splitlines()) == 4
    assert out.splitlines()[-1] == f"newest good: {saved / 'checkpoints' / 'step-0000000300'}"
    part = manifest.read(folder / "step-0000000300").tensors["net/bias"].parts[0]
    flip(folder / "step-0000000300" / part.file, part.offset)
    (folder / "step-0000000100" / "manifest.json").unlink()
    status, out, _ = run("verify", folder)
    assert status == 1
    first, missing, second, third, fault, newest = out.splitlines()
    assert first.startswith(f"{folder}/step-0000000100: 1 fault, ")
    assert missing == "  manifest.json: no such file or folder"
    assert second.startswith(f"{folder}/step-0000000200: good, ")
    assert third.startswith(f"{folder}/step-0000000300: 1 fault, ")
    assert fault.startswith(f"  {part.file}, net/bias: expected checksum ")
    assert newest == f"newest good: {folder}/step-0000000200"
    assert run("verify", folder / "step-0000000200")[0] == 0
    assert run("verify", folder / "step-0000000300", folder / "step-0000000200")[0] == 1


@pytest.mark.parametrize("place", ["summary_of", "size_of"])
def test_ls_leaves_out_what_a_job_removes_meanwhile(place, run, folder, monkeypatch):
    remove_before(monkeypatch, complete_steps, place, folder / "step-0000000100")
    status, out, error = run("ls", folder)
    assert (status, error) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["step", "200", "300"]


@pytest.mark.parametrize(
    "place", [(complete_steps, "size_of"), (inspect, "faults"), (manifest, "read"), (inspect, "_index_faults")]
)
def test_verify_takes_what_a_job_removes_meanwhile_for_no_fault(place, run, folder, monkeypatch):
    """Not of that checkpoint alone: `overview`, too, reads manifests."""
    first = folder / "step-0000000100"
    remove_before(monkeypatch, *place, first, paths=[first])
    status, out, error = run("verify", first, folder / "step-0000000200")
    assert (status, error) == (0, "")
    gone, good, newest = out.splitlines()
    assert gone == f"{first}: removed meanwhile"
    assert good.startswith(f"{folder}/step-0000000200: good, ") and newest.endswith("step-0000000200")
    first.with_name("gone").rename(first)
    assert run("verify", first)[:2] == (1, f"{first}: removed meanwhile\n")  # nothing is good


def remove_before(monkeypatch, module, name, path, paths=None):
    """When that function is called for the first time, with a path among ``paths`` or any, a folder goes."""
    call = getattr(module, name)

    def first_removing(given, *more):
        if path.exists() and (paths is None or given in paths):
            path.rename(path.with_name("gone"))
        return call(given, *more)

    monkeypatch.setattr(module, name, first_removing)


def test_verify_tells_a_log_how_far_it_is(run, saved, monkeypatch):
    from hpcdp.cli import checkpoint

    monkeypatch.setattr(checkpoint, "_LOG_EVERY_S", 0.0)
    _, _, error = run("verify", saved / "checkpoints" / "step-0000000100")
    assert re.fullmatch(r"(step-0000000100: [\d.]+ [kM]?B(ytes)? of 2\.8\d MB\n)+", error.replace("bytes", "B"))


@pytest.mark.parametrize("columns", [20, 47])
def test_a_narrow_terminal_need_not_have_all_characters(columns, monkeypatch):
    from hpcdp.cli import checkpoint

    monkeypatch.setattr(checkpoint, "_REFRESH_S", -1.0)
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    for name, value in (("TTY_INTERACTIVE", "1"), ("COLUMNS", str(columns)), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", terminal)
    with checkpoint.BytesBar("verify runs/mlp-digits-001/checkpoints/step-0000000100", 10**9) as bar:
        bar.tell(10**7)
    terminal.flush()
    assert b"verify" in terminal.buffer.getvalue()


def test_diff(run, saved, tmp_path):
    a, b = (saved / "checkpoints" / f"step-0000000{n}00" for n in (1, 2))
    status, out, _ = run("diff", a, b)
    assert (status, out.splitlines()) == (0, [f"A  {a}", f"B  {b}", "no difference in 10 tensors and all values"])
    for name, x in (("a", 1.0), ("b", 1.5)):
        save(tmp_path / name, state=lambda step, world, x=x: {"x": np.array([0, x]), "n": x})
    status, out, _ = run("diff", tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert out.splitlines()[2:] == [
        "x: 1 of 2 elements differ, by at most 0.5 (relative 0.333)", "n: 1.0 and 1.5", "2 differences",
    ]  # fmt: skip
    assert run("diff", tmp_path / "a", tmp_path / "b", "--rtol", "0.5")[0] == 0


def test_a_damaged_one_of_several_offers_another(run, folder, tmp_path):
    flip(folder / "step-0000000300" / "manifest.json", 20)
    flip(folder / "step-0000000200" / "manifest.json", 20)
    for command in (["show", folder], ["export", folder, tmp_path / "out.npz"]):
        status, _, error = run(*command)
        assert status == 2
        assert "got a checksum that does not fit; pass --step 100 for another checkpoint" in error
        assert run(*command, "--step", "100")[0] == 0
        assert "--step" not in run(command[0], folder / "step-0000000300", *command[2:])[2]  # which is one
    status, _, error = run("show", folder, "--step", "200", "net/0.weight")
    assert "pass --step 100 for another checkpoint" in error
    flip(folder / "step-0000000100" / "manifest.json", 20)
    assert run("show", folder)[2].endswith("a checksum that does not fit\n")


def test_a_name_may_come_after_an_option(run, saved):
    folder = saved / "checkpoints"
    name = re.search(r"net/\S+", run("show", folder, "net")[1])[0]
    expected = run("show", folder, name, "--step", "200")
    assert expected[0] == 0
    assert run("show", folder, "--step", "200", name) == expected
    status, _, error = run("show", folder, "--step", "200", name, "another")
    assert status == 2 and "unrecognized arguments: another" in error


def test_a_folder_without_checkpoints_is_left_as_it_was(run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    status, out, error = run("prune", tmp_path, "--keep", "1")
    assert (status, out) == (2, "") and f"prune [{tmp_path}]: expected checkpoints, got none" in error
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]


def test_export(run, saved, tmp_path):
    status, out, _ = run("export", saved, tmp_path / "net.npz", "--name", "net", "--step", "200")
    assert status == 0
    assert out.startswith(f"{tmp_path}/net.npz: 8 tensors of step 200, ")
    assert set(np.load(tmp_path / "net.npz").files) >= {"weight", "bias"}
    status, out, _ = run("export", saved, tmp_path / "best.npz", "--name", "net", "--best=-accuracy")
    assert status == 0 and "8 tensors of step 100, " in out
    status, out, _ = run("export", saved, tmp_path / "all", "--format", "npz")
    assert status == 0
    assert out.endswith("; left out: 6 values, 1 per-rank entry\n")


def test_prune(run, folder):
    shutil.copytree(folder / "step-0000000200", folder / "step-0000000400.tmp")
    before = sorted(each.name for each in folder.iterdir())
    status, out, _ = run("prune", folder, "--keep", "1", "--best=-accuracy", "--dry-run")
    assert status == 0
    assert sorted(each.name for each in folder.iterdir()) == before
    lines = out.splitlines()
    assert [line.rpartition(":")[0] for line in lines[:-1]] == [
        "would remove step-0000000400.tmp, left over", "would remove step 200",
    ]  # fmt: skip
    assert lines[-1].endswith("in all; step 300 stays and is good")
    status, done, _ = run("prune", folder, "--keep", "1", "--best=-accuracy")
    assert (status, done) == (0, out.replace("would remove", "removed"))
    assert sorted(each.name for each in folder.iterdir()) == ["step-0000000100", "step-0000000300", "writer.lock"]
    assert run("prune", folder, "--keep", "2")[1] == "nothing to remove\n"
    assert "removed step 100" in run("prune", folder, "--keep", "1")[1]


def test_prune_keeps_the_last_good_one(run, folder):
    for step in (300, 200):
        part = manifest.read(folder / f"step-0000000{step}").tensors["net/weight"].parts[0]
        flip(folder / f"step-0000000{step}" / part.file, part.offset)
    status, _, error = run("prune", folder, "--keep", "2")
    assert status == 2
    assert "expected a good checkpoint among those that stay, got step 300, shard-0000" in error
    assert error.count("\n") == 1 and "; keep 3: then step 100 stays, which is good" in error
    assert len(list(folder.glob("step-*"))) == 3
    status, out, _ = run("prune", folder, "--keep", "1", "--keep-every", "100")
    assert (status, out) == (0, "nothing to remove\n")
    status, out, _ = run("prune", folder, "--keep", "1", "--best=-accuracy")
    assert status == 0
    assert "step 300 stays, but is damaged: shard-0000" in out
    assert "removed step 200: " in out


def test_prune_removes_what_has_lost_its_manifest_where_something_good_stays(run, folder):
    for step in (200, 300):
        (folder / f"step-0000000{step}" / "manifest.json").unlink()
    assert "300" in run("ls", folder)[1] and "manifest.json" in run("ls", folder)[1]
    status, out, _ = run("prune", folder, "--keep", 1)
    assert status == 0 and "removed step-0000000300, left over" in out and "step 100 stays and is good" in out
    assert sorted(each.name for each in folder.iterdir()) == ["step-0000000100", "writer.lock"]
    (folder / "step-0000000100" / "manifest.json").unlink()
    assert run("prune", folder, "--keep", 1)[:2] == (0, "nothing to remove\n")
    assert (folder / "step-0000000100").exists()


def test_what_the_system_refuses_is_one_line(run, folder, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        status, _, error = run("prune", folder, "--keep", "1")
    assert status == 2
    assert error == f"hpcdp: prune [{folder / 'step-0000000100'}]: got no permission\n"
    monkeypatch.setattr(Path, "iterdir", refuse)
    status, _, error = run("ls", folder)
    assert (status, error) == (2, f"hpcdp: checkpoint ls [{folder}]: got no permission\n")


def test_prune_removes_links_and_not_what_they_lead_to(run, folder, tmp_path):
    moved = (folder / "step-0000000100").rename(tmp_path / "moved")
    (folder / "step-0000000100").symlink_to(moved)
    assert run("prune", folder, "--keep", "2")[0] == 0
    assert sorted(each.name for each in folder.iterdir()) == [
        "step-0000000200", "step-0000000300", "writer.lock",
    ]  # fmt: skip
    assert (moved / "manifest.json").exists()


def test_prune_while_somebody_saves(run, folder):
    code = "import sys; from pathlib import Path; from hpcdp.checkpoint.complete_steps import WriterLock\n" \
           "lock = WriterLock(Path(sys.argv[1])); print(flush=True); input()"  # fmt: skip
    job = subprocess.Popen([sys.executable, "-c", code, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        job.stdout.readline()
        for more in ([], ["--dry-run"]):
            status, _, error = run("prune", folder, "--keep", "1", *more)
            assert status == 2
            assert f"expected no other job that saves here, got process {job.pid} of " in error
    finally:
        job.communicate(b"\n", timeout=30)
    assert len(list(folder.glob("step-*"))) == 3


@pytest.mark.parametrize("command", ["show", "diff"])
@pytest.mark.thorough
def test_any_names_on_any_terminal(command, tmp_path):
    save(tmp_path, (1, 2), 1, state=lambda step, world: {"größe": np.full(2, step), "\ud800": step})
    both = [tmp_path / "step-0000000001", tmp_path / "step-0000000002"]
    line = [sys.executable, "-m", "hpcdp.cli", "checkpoint", command, *(both if command == "diff" else both[:1])]
    done = subprocess.run(line, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert done.returncode == (command == "diff") and done.stderr == ""
    assert "gr\\xf6\\xdfe" in done.stdout and "\\ud800" in done.stdout


def test_a_full_disk_behind_standard_output(saved):
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-m", "hpcdp.cli", "checkpoint", "show", saved]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "checkpoint [standard output]: got no space left on device" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lss"], "unknown checkpoint command 'lss'; did you mean 'ls'?"),
        ([], "expected a command, got none"),
        (["ls", "{folder}/nowhere"], "expected a folder of checkpoints, or of a run, got no such folder"),
        (["ls", "{folder}/writer.lock"], "got a file"),
        (["show", "{folder}", "--step", "7"], "expected one of step 100, 200, 300, got 7"),
        (["show", "{folder}/step-0000000100", "--step", "100"], "--step: expected a folder of several checkpoints"),
        (["ls", "{empty}"], "read checkpoints [{empty}]: expected checkpoints, got none"),
        (["ls", "{empty}", "--json"], "expected checkpoints, got none"),
        (["prune", "{folder}/step-0000000100", "--keep", "1"], "several checkpoints, got the folder of one"),
        (["prune", "{folder}", "--keep", "1", "--best=-"], "prune [best]: expected 'metric' or '-metric', got '-'"),
        (["show", "{empty}"], "expected a complete checkpoint, got none"),
        (["verify", "{empty}"], "expected checkpoints, got none"),
        (["verify"], "the following arguments are required: PATH"),
        (["diff", "{folder}", "{folder}", "--rtol", "-1"], "expected a number from 0, got '-1'"),
        (["export", "{folder}", "out"], "expected a name that ends in .npz, .safetensors, .pt, .pth, got no suffix"),
        (["export", "{folder}", "out", "--format", "npy"], "unknown format 'npy'; did you mean 'npz'?"),
        (["export", "{folder}", "x.npz", "--name", "nat"], "a name of the state, which has net, optimizer, rng"),
        (["export", "{folder}", "x.npz", "--best", "speed"], "checkpoints with the metric speed, got none"),
        (["export", "{folder}", "x.npz", "--best=-"], "[best]: expected 'metric' or '-metric', got '-'"),
        (["export", "{folder}", "x.npz", "--best", "a", "--step", "100"], "--best: expected none with --step, got a"),
        (["export", "{folder}/step-0000000100", "x.npz", "--best", "a"], "--best: expected a folder of several"),
        (["prune", "{folder}"], "the following arguments are required: --keep"),
        (["prune", "{folder}", "--keep", "0"], "expected a whole number from 1, got '0'"),
        (["prune", "{folder}", "--keep", "1", "--best", "speed"], "checkpoints with the metric speed, got none"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_status_2(arguments, says, run, saved, tmp_path):
    folders = {"folder": saved / "checkpoints", "empty": tmp_path}
    status, out, error = run(*(each.format(**folders) for each in arguments))
    assert (status, out) == (2, "")
    assert says.replace("{empty}", str(tmp_path)) in error
    assert error.startswith("hpcdp: ") and error.count("\n") == 1
