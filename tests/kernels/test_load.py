import errno
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from raises import raises

from hpcdp import kernels
from hpcdp.core import files
from hpcdp.core.environment import RANKS
from hpcdp.errors import ConfigError

LOAD = """
import json
import numpy as np
from hpcdp import kernels
kernels.load("shm_exchange").post(np.zeros(64, np.int32), 0, 1)
stats = kernels.load("shm_exchange").post.stats
print(json.dumps([sum(stats.cache_hits.values()), sum(stats.cache_misses.values())]))
"""


PLANTED = """
from .jit import kernel

@kernel()
def double(x, out):
    for i in range(x.size):
        out[i] = 2 * x[i]
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A folder with two modules of kernels that take a tenth of the time of real ones to compile."""
    folder = tmp_path_factory.mktemp("planted")
    for name in ("planted_one", "planted_two"):
        (folder / f"{name}.py").write_text(PLANTED)
    return folder


def test_one_process_compiles_and_the_others_and_another_clone_read_its_cache(tmp_path):
    environ = os.environ | {"HPCDP_CACHE_DIR": str(tmp_path / "cache")}
    environ.pop("NUMBA_CACHE_DIR", None)

    def start(where, then=""):
        program = LOAD.replace("import json", f"import json, sys; sys.path.insert(0, {str(where)!r})")
        program += f"assert kernels.__file__.startswith({str(where)!r})\n{then}"
        return subprocess.Popen([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE)

    def hits_and_misses(process):
        found = json.loads(process.communicate(timeout=100)[0])
        assert process.returncode == 0
        return found

    package = Path(kernels.__file__).parents[1]
    started = [start(package.parent) for _ in range(2)]
    assert sorted(map(hits_and_misses, started)) == [[0, 1], [1, 0]]
    assert list((tmp_path / "cache").rglob("*.nbc"))
    clone = tmp_path / "clone"
    shutil.copytree(package, clone / "hpcdp", ignore=shutil.ignore_patterns("__pycache__", "sets"))
    assert hits_and_misses(start(clone, "assert 'numba.cpython.unicode' not in sys.modules")) == [1, 0]  # no compiler


def test_the_folder_is_chosen_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCDP_CACHE_DIR", str(tmp_path / "chosen"))
    assert kernels.cache_dir() == tmp_path / "chosen"
    monkeypatch.delenv("HPCDP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kernels.cache_dir() == tmp_path / "xdg" / "hpcdp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kernels.cache_dir() == tmp_path / "home" / ".cache" / "hpcdp"


@pytest.fixture
def unwarned(monkeypatch):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(files, "_warned", False)
    monkeypatch.setattr(kernels, "_all_kept", True)


@pytest.mark.usefixtures("unwarned")
def test_a_usual_folder_that_cannot_be_made_is_replaced_by_one_of_this_user_after_one_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("HPCDP_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.warns(
        UserWarning, match=r"below/hpcdp\]: a path through a file; .* is used, set HPCDP_CACHE_DIR"
    ) as told:
        folder = kernels.cache_dir()
        assert kernels.cache_dir() == folder
    assert len(told) == 1
    assert folder.parent == tmp_path
    assert folder.stat().st_uid == os.getuid()
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("unwarned")
def test_a_user_without_a_home_gets_a_temporary_folder(tmp_path, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("HPCDP_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match="home directory"):
        assert kernels.cache_dir().parent == tmp_path


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize("writable", [True, False])
def test_a_temporary_folder_that_others_may_write_is_neither_written_nor_read(tmp_path, monkeypatch, writable):
    (tmp_path / "file").write_text("")
    (tmp_path / f"hpcdp-{os.getuid()}").mkdir()
    (tmp_path / f"hpcdp-{os.getuid()}").chmod(0o777)
    monkeypatch.delenv("HPCDP_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    with raises(ConfigError, operation="kernel cache", where=tmp_path / "hpcdp-0") as caught:
        kernels.cache_dir()
    assert caught.value.got == f"{tmp_path}/hpcdp-{os.getuid()}, which every user may write"  # the line may be cut


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize(("variable", "rank"), [("OMPI_COMM_WORLD_RANK", 1), ("PMI_RANK", 3), ("SLURM_PROCID", 2)])
def test_only_rank_0_warns(tmp_path, monkeypatch, variable, rank, recwarn):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("HPCDP_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv(variable, str(rank))
    kernels.cache_dir()
    assert not recwarn.list
    monkeypatch.setattr(files, "_warned", False)
    monkeypatch.setenv(variable, "0")
    kernels.cache_dir()
    assert len(recwarn.list) == 1


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize("problem", ["a file", "below a file", "not writable"])
def test_a_folder_that_the_user_names_must_be_usable(tmp_path, monkeypatch, problem):
    named = tmp_path / "named"
    if problem == "a file":
        named.write_text("")
        why = "got a file, no folder; unset it"
    elif problem == "below a file":
        named.write_text("")
        named, why = named / "below", "a path through a file"
    else:
        why = "no permission to write"
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != named)
    monkeypatch.setenv("HPCDP_CACHE_DIR", str(named))
    monkeypatch.setattr(kernels, "_loaded", {})
    for call in (kernels.cache_dir, lambda: kernels.load("gradients")):
        with pytest.raises(ConfigError) as caught:
            call()
        assert f"HPCDP_CACHE_DIR={named}" in str(caught.value) and why in str(caught.value)
        assert "\n" not in str(caught.value)


UNKEPT = """
import json, os, sys, tempfile, warnings
import numpy as np
from pathlib import Path
from hpcdp import kernels

def full(*args, **kwargs):
    raise OSError(int(sys.argv[2]), os.strerror(int(sys.argv[2])))

where = sys.argv[1]
if where == "room":
    Path.mkdir = tempfile.TemporaryFile = full
elif where == "while compiling":
    kernels._ROOM_NBYTES = 1
elif where == "lock":
    import fcntl
    fcntl.flock = full
elif where == "kept":
    import numba.core.caching
    numba.core.caching.IndexDataCacheFile._open_for_write = full
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    kernels.__path__.append(sys.argv[3])
    double, found = kernels.load("planted_one").double, []
    for dtype in ("f4", "f8"):
        out = np.zeros(3, dtype)
        double(np.arange(3, dtype=dtype), out)
        found.append(out.tolist())
kept = [p.name for p in Path(os.environ["HPCDP_CACHE_DIR"]).rglob("*") if p.suffix == ".nbc"]
print(json.dumps([[str(w.message) for w in told if w.category is UserWarning], found, kept]))
"""


DOUBLED = [[0.0, 2.0, 4.0]] * 2


def unkept(where, code, folder, planted):
    environ = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", *RANKS)}
    environ["HPCDP_CACHE_DIR"] = str(folder)
    command = [sys.executable, "-c", UNKEPT, where, str(int(code)), str(planted)]
    return json.loads(subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True, timeout=100).stdout)


@pytest.mark.parametrize("where", ["room", pytest.param("kept", marks=pytest.mark.thorough)])
def test_a_full_disk_costs_one_warning_and_the_kernels_are_compiled(tmp_path, where, planted):
    told, result, kept = unkept(where, errno.ENOSPC, tmp_path, planted)
    assert len(told) == 1 and "No space left on device; kernels are compiled by every process" in told[0]
    assert str(tmp_path) in told[0]
    assert result == DOUBLED
    assert kept == []
    assert list(planted.rglob("*.nbc")) == []


def test_without_locks_on_the_file_system_kernels_are_kept_all_the_same(tmp_path, planted):
    told, result, kept = unkept("lock", errno.ENOLCK, tmp_path, planted)
    assert len(told) == 1 and "No locks available" in told[0]
    assert result == DOUBLED
    assert any(name.endswith(".nbc") for name in kept)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which only root may")
def test_a_disk_that_is_full_while_kernels_are_compiled(tmp_path, planted):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k,mode=700", "tmpfs", str(tmp_path)], check=False)
    if mounted.returncode:
        pytest.skip("this container may not mount")
    try:
        told, result, _ = unkept("while compiling", 0, tmp_path, planted)
        assert result == DOUBLED
        assert len(told) == 1 and "No space left on device" in told[0]
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


ASK = """
import json, sys
import numpy as np
from hpcdp import kernels
kernels._PATIENCE_S, kernels._LIMIT_S = 0.1, float(sys.argv[1])
kernels.__path__.append(sys.argv[3])
kernels.load("planted_one").double(np.zeros(3, "f4"), np.zeros(3, "f4"))
double, out = kernels.load("planted_two").double, np.zeros(3, sys.argv[2])
double(np.arange(3, dtype=out.dtype), out)
print(json.dumps([out.tolist(), sum(double.stats.cache_misses.values())]))
"""
COMPILING = "hpcdp: compiling kernels that are new on this machine, for up to two minutes"


def ask(folder, planted, limit_s, dtype="f4", rank=0):
    environ = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", *RANKS)}
    environ |= {"HPCDP_CACHE_DIR": str(folder), "OMPI_COMM_WORLD_RANK": str(rank)}
    command = [sys.executable, "-c", ASK, str(limit_s), dtype, str(planted)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(process):
    """What it has doubled, how many kernels it has compiled for that, and the lines that it has said."""
    try:
        output, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, said
    doubled, misses = json.loads(output)
    assert doubled == DOUBLED[0]
    return misses, said.splitlines()


@pytest.fixture
def compiled_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCDP_CACHE_DIR", str(tmp_path))
    folder = kernels.compiled_dir()
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def held(compiled_dir):
    """Another process, for all that the file system knows, compiles the same kernels, and never ends."""
    with open(compiled_dir / "compile.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield "hpcdp: waiting for another rank or job, which is compiling kernels"


@pytest.mark.thorough
def test_a_lock_that_is_held_delays_only_what_is_not_compiled(tmp_path, planted, held):
    # Of two kernels only the first is waited for.
    assert answer(ask(tmp_path, planted, 0.5)) == (1, [COMPILING, held])
    assert answer(ask(tmp_path, planted, 0.5, "f8")) == (1, [COMPILING, held])
    assert answer(ask(tmp_path, planted, 1000, "f8")) == (0, [])


def test_ranks_wait_no_longer_than_for_what_they_need(tmp_path, planted, compiled_dir, held):
    elsewhere = tmp_path / "elsewhere"
    assert answer(ask(elsewhere, planted, 1000)) == (1, [COMPILING])
    process = ask(tmp_path, planted, 1000)
    assert [process.stderr.readline().rstrip() for _ in range(2)] == [COMPILING, held]
    for file in elsewhere.rglob("*.nbc"):
        os.replace(file, compiled_dir / file.name)
    assert answer(process) == (0, [])


def test_ranks_other_than_0_say_nothing(tmp_path, planted, held):
    assert answer(ask(tmp_path, planted, 0.5, rank=1)) == (1, [])


@pytest.mark.usefixtures("unwarned")
def test_what_is_forked_while_kernels_are_compiled_keeps_nobody_waiting(compiled_dir):
    its_end, our_end = os.pipe()
    with kernels.one_process_compiles(lambda: False):
        child = os.fork()
        if not child:
            os.read(its_end, 1)
            os._exit(0)
    try:
        with open(compiled_dir / "compile.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.write(our_end, b" ")
        os.waitpid(child, 0)
        os.close(its_end)
        os.close(our_end)


DAMAGE = """
import json, os, random, sys
import numpy as np
from pathlib import Path
from hpcdp import kernels

planted, cache = map(Path, sys.argv[1:])
kernels.__path__.append(str(planted))

def multiplied(name, dtype):
    kernel, out = getattr(kernels.load(name), "multiply"), np.zeros(3, dtype)
    kernel(np.arange(3, dtype=dtype), out)
    return out.tolist(), sum(kernel.stats.cache_misses.values())

def job():
    read, write = os.pipe()
    if not os.fork():
        os.write(write, json.dumps(multiplied("doubles", "f4")).encode())
        os._exit(0)
    os.close(write)
    os.wait()
    with open(read) as answer:
        return json.loads(answer.read() or "null")

def damages(good):
    yield "empty", b""
    yield "truncated", good[:len(good) // 2]
    yield "garbage", random.Random(0).randbytes(len(good))
    yield "longer", good + b"."
    for seed in range(3):
        at = random.Random(seed).randrange(len(good) - 512)
        yield f"noise {seed}", good[:at] + random.Random(seed).randbytes(64) + good[at + 64:]
        yield f"zeros {seed}", good[:at] + bytes(512) + good[at + 512:]

for dtype in ("f4", "f8"):
    multiplied("triples", dtype)
found = {"new": [job(), job()]}
kept = {path: path.read_bytes() for path in cache.rglob("*.nb[ci]")}
for path in [path for path in kept if path.name.startswith("doubles.")]:
    others = [(other.name, data) for other, data in kept.items() if other.name.startswith("triples.")]
    for what, data in [*damages(kept[path]), *others]:
        path.write_bytes(data)
        found[f"{path.suffix}: {what}"] = [job(), job()]
same = {path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"} == set(kept)
source = planted / "doubles.py"
source.write_text(source.read_text().replace("2 *", "20 *"))
print(json.dumps([found, same, [job(), job()]]))
"""


@pytest.mark.parametrize("variable", ["HPCDP_CACHE_DIR", pytest.param("NUMBA_CACHE_DIR", marks=pytest.mark.thorough)])
def test_a_damaged_file_is_compiled_anew_and_replaced(tmp_path, variable):
    cache = tmp_path / variable
    for name, factor in (("doubles", 2), ("triples", 3)):
        (tmp_path / f"{name}.py").write_text(PLANTED.replace("double", "multiply").replace("2 *", f"{factor} *"))
    environ = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", *RANKS)}
    environ |= {"HPCDP_CACHE_DIR": str(tmp_path / "HPCDP_CACHE_DIR"), variable: str(cache)}
    command = [sys.executable, "-c", DAMAGE, str(tmp_path), str(cache)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=100)
    assert done.stderr == COMPILING + "\n"
    found, same_files, of_new_source = json.loads(done.stdout)
    compiled_then_read = [[DOUBLED[0], 1], [DOUBLED[0], 0]]
    assert {what: jobs for what, jobs in found.items() if jobs != compiled_then_read} == {}
    assert len(found) == 13 and same_files
    assert of_new_source == [[[0.0, 20.0, 40.0], 1], [[0.0, 20.0, 40.0], 0]]


CONVERT = """
import json
import numpy as np
from numba import float32, float64, int64, types
from hpcdp import kernels
from hpcdp.kernels.jit import kernel

@kernel([types.void(f[::1], float64) for f in (float32, float64)])
def fill(out, number):
    for i in range(out.size):
        out[i] = number

@kernel(types.int64(int64))
def inner(number):
    return 2 * number

@kernel(types.void(float64[::1], int64))
def outer(out, number):
    fill(out, inner(3) + number)

at_first = len(fill.overloads)
out, found = np.zeros(2, "f4"), []
for number in (1, np.float32(2.5), True, 1.5):
    fill(out, number)
    found.append(out.tolist())
    assert len(fill.overloads) == 1
both = np.zeros(2)
outer(both, 1)
for _ in range(2):  # as two threads may that call it at once
    direct = fill.compile((float32[::1], int64))
direct(out, 7)
compile, asked = fill.compile, []
fill.compile = lambda wanted: asked.append(wanted) or compile(wanted)
fill(out, 7)
again = len(asked)
refused = []
for wrong in (np.zeros(2, "i4"), np.zeros((2, 2), "f4"), np.zeros(4, "f4")[::2]):
    try:
        fill(wrong, 1.0)
    except TypeError as error:
        refused.append(str(error))
print(json.dumps([at_first, found, both.tolist(), out.tolist(), again, len(inner.overloads), refused]))
"""


def test_a_kernel_is_compiled_for_the_declared_types_that_it_is_called_with(tmp_path):
    environ = os.environ | {"HPCDP_CACHE_DIR": str(tmp_path)}
    (tmp_path / "convert.py").write_text(CONVERT)
    for compiled in (True, False):
        command = [sys.executable, str(tmp_path / "convert.py")]
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True, timeout=100)
        at_first, found, both, direct, again, inner, refused = json.loads(done.stdout)
        assert again == 0  # each call would find one more to choose from, and cost more
        assert (at_first, inner) == (0, int(compiled))  # what was read has the code of the kernels that it calls
        assert found == [[1.0] * 2, [2.5] * 2, [1.0] * 2, [1.5] * 2]
        assert both == [7.0, 7.0] and direct == [7.0, 7.0]
        assert len(refused) == 3 and all(
            "No matching definition for argument type(s) array(" in each for each in refused
        )


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"NUMBA_DISABLE_JIT": "1"}, "kernels [NUMBA_DISABLE_JIT]: expected 0, "),
        pytest.param(
            {"NUMBA_CPU_NAME": "generic"},
            "kernels [NUMBA_CPU_FEATURES]: expected a list with +f16c, ",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_settings_of_numba_with_which_there_are_no_kernels_are_told(tmp_path, variables, told):
    if "NUMBA_CPU_NAME" in variables and platform.machine() != "x86_64":
        pytest.skip("f16c is a feature of x86-64")
    cast = "import numpy as np; from hpcdp import kernels; f, h = np.ones(3, 'f4'), np.ones(3, 'u2'); "
    command = [
        sys.executable,
        "-c",
        cast + "kernels.load('networks').to_float16(f, h); print(h.view('f2').tolist())",
    ]
    environ = os.environ | {"HPCDP_CACHE_DIR": str(tmp_path)}
    refused = subprocess.run(command, env=environ | variables, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and told in refused.stderr.splitlines()[-1]
    if "NUMBA_CPU_NAME" in variables:
        variables = variables | {"NUMBA_CPU_FEATURES": "+sse3,+f16c"}
        found = subprocess.run(command, env=environ | variables, capture_output=True, text=True, timeout=60)
        assert found.stdout == "[1.0, 1.0, 1.0]\n"


@pytest.mark.usefixtures("unwarned")
def test_the_usual_folder_is_replaced_where_others_may_write_on_the_way_to_it(tmp_path, monkeypatch):
    monkeypatch.delenv("HPCDP_CACHE_DIR", raising=False)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.warns(
        UserWarning, match=r"cache/hpcdp\]: .*/shared, which every user may write; .* is used, set HPCDP"
    ):
        assert kernels.cache_dir() == tmp_path / f"hpcdp-{os.getuid()}"


def test_numbas_folder_is_refused_where_others_may_write(tmp_path, monkeypatch):
    from numba.core import config

    from hpcdp.kernels import jit

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    jit._refuse_settings()
    monkeypatch.setattr(files, "_private", set())
    tmp_path.chmod(0o777)
    with raises(ConfigError, operation="kernel cache", where=f"NUMBA_CACHE_DIR={tmp_path}"):
        jit._refuse_settings()
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "sub"))  # not there yet
    with raises(ConfigError, operation="kernel cache", where=f"NUMBA_CACHE_DIR={tmp_path}/sub"):
        jit._Forgiving(test_an_unknown_kernel_is_an_import_error, tmp_path)


class Planted:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_file_that_others_may_have_written_is_not_unpickled(tmp_path, monkeypatch, capfd):
    from hpcdp.kernels.jit import _Summed

    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    kept, executed = _Summed(str(tmp_path), "name", None), tmp_path / "executed"
    kept.save("key", Planted(executed))
    path = kept._path("key")
    assert path.stat().st_mode & 0o022 == 0
    path.chmod(0o666)
    assert kept.load("key") is None and not executed.exists()
    assert capfd.readouterr().err == (
        f"hpcdp: kernel cache: expected files that this user alone may write, got {path}, which every user may write; "
        "compiling anew\n"
    )
    if os.geteuid() == 0:
        path.chmod(0o644)
        os.chown(path, 4711, 4711)
        assert kept.load("key") is None and not executed.exists()
        os.chown(path, 0, 0)
    path.chmod(0o600)
    path.rename(tmp_path / "other")
    path.symlink_to(tmp_path / "other")
    capfd.readouterr()
    assert kept.load("key") is None and not executed.exists()
    assert f"got {path}, which is no regular file; compiling anew\n" in capfd.readouterr().err
    path.unlink()
    os.mkfifo(path)
    assert kept.load("key") is None
    path.unlink()
    (tmp_path / "other").rename(path)
    kept.load("key")
    assert executed.exists()


def test_an_unknown_kernel_is_an_import_error():
    with pytest.raises(ImportError):
        kernels.load("nonsense")


def test_importing_hpcdp_imports_nothing_heavy():
    code = "import sys, hpcdp; print([m for m in sys.modules if m.partition('.')[0] in sys.argv[1:]])"
    heavy = ["numba", "mpi4py", "matplotlib", "h5py", "rich", "tensorboardX", "torch", "cupy"]
    output = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
    assert Path(kernels.__file__).parent.name == "kernels"


@pytest.mark.parametrize("changed", ["shm_exchange.py", "reference.py", "convolution/direct.py"])
def test_a_change_of_any_source_asks_for_new_machine_code(tmp_path, monkeypatch, changed):
    monkeypatch.setenv("HPCDP_CACHE_DIR", str(tmp_path))
    before = kernels.compiled_dir()
    assert kernels.compiled_dir() == before
    copy = tmp_path / "kernels"
    shutil.copytree(Path(kernels.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(kernels, "__file__", str(copy / "__init__.py"))
    first = kernels.compiled_dir()
    assert first == before
    with (copy / changed).open("a") as source:
        source.write("\n")
    assert kernels.compiled_dir() != first
