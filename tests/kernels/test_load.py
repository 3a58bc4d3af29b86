import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdp import kernels

LOAD = """
import json
from hpcdp import kernels
stats = kernels.load("sync").wait_all.stats
print(json.dumps([sum(stats.cache_hits.values()), sum(stats.cache_misses.values())]))
"""


def test_one_process_compiles_and_the_others_read_its_cache(tmp_path):
    environ = os.environ | {"HPCDP_CACHE_DIR": str(tmp_path)}
    environ.pop("NUMBA_CACHE_DIR", None)
    started = [subprocess.Popen([sys.executable, "-c", LOAD], env=environ, stdout=subprocess.PIPE) for _ in range(3)]
    hits_and_misses = [json.loads(process.communicate(timeout=100)[0]) for process in started]
    assert sorted(hits_and_misses) == [[0, 1], [1, 0], [1, 0]]
    assert list(tmp_path.rglob("*.nbc"))


def test_the_folder_is_chosen_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCDP_CACHE_DIR", str(tmp_path / "chosen"))
    assert kernels.cache_dir() == tmp_path / "chosen"
    monkeypatch.delenv("HPCDP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kernels.cache_dir() == tmp_path / "xdg" / "hpcdp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kernels.cache_dir() == tmp_path / "home" / ".cache" / "hpcdp"


def test_a_folder_that_cannot_be_made_is_replaced_by_one_of_this_user(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HPCDP_CACHE_DIR", str(tmp_path / "file" / "below"))
    folder = kernels.cache_dir()
    assert folder != tmp_path / "file" / "below"
    assert folder.stat().st_uid == os.getuid()
    assert folder.stat().st_mode & 0o077 == 0


def test_an_unknown_kernel_is_an_import_error():
    with pytest.raises(ImportError):
        kernels.load("nonsense")


def test_importing_hpcdp_imports_nothing_heavy():
    code = "import sys, hpcdp; print([m for m in sys.modules if m.partition('.')[0] in sys.argv[1:]])"
    heavy = ["numba", "mpi4py", "matplotlib", "h5py", "rich", "tensorboardX", "torch", "cupy"]
    output = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
    assert Path(kernels.__file__).parent.name == "kernels"


def test_a_change_of_any_source_asks_for_new_machine_code(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCDP_CACHE_DIR", str(tmp_path))
    before = kernels._compiled_dir()
    assert kernels._compiled_dir() == before
    copy = tmp_path / "kernels"
    shutil.copytree(Path(kernels.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(kernels, "__file__", str(copy / "__init__.py"))
    first = kernels._compiled_dir()
    os.utime(copy / "sync.py", ns=(0, 0))
    assert kernels._compiled_dir() != first
