"""Site profiles: where they are looked for, and that each mistake is one line that names what is valid."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raises import raises

from hpcdp.errors import ConfigError
from hpcdp.launch import slurm_scripts
from hpcdp.launch.slurm_scripts import Profile, load, places

WHOLE = """
launcher = "mpirun"
time = "2-12"
partition = "main"
modules = ["gcc", "openmpi"]
venv = "/x"
sbatch = ["--exclusive", "--constraint=ib"]
[env]
A = "b c"
N = 3
"""


def test_a_whole_profile(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(WHOLE)
    assert load(path) == Profile(
        launcher="mpirun", time="2-12", partition="main", modules=("gcc", "openmpi"), venv="/x",
        sbatch=("--exclusive", "--constraint=ib"), env={"A": "b c", "N": "3"},
    )  # fmt: skip


def test_where_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(ConfigError, operation="site profile", expected="hpcdp-site.toml"):
        load(environ={"HOME": f"/{'x' * 300}"})
    environ = {"HOME": str(tmp_path)}
    with raises(ConfigError, operation="site profile", expected="hpcdp-site.toml"):
        load(environ=environ)
    for number, place in enumerate([*reversed(places(environ)), Path("said.toml")]):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f'time = "{number}"')
    assert load(environ=environ).time == "1"
    assert load(environ=environ | {"HPCDP_SITE": "said.toml"}).time == "2"
    Path("hpcdp-site.toml").unlink()
    assert load(environ=environ).time == "0"


def test_a_profile_that_others_may_write_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("hpcdp-site.toml")
    path.write_text(WHOLE)
    path.chmod(0o664)
    with raises(ConfigError, operation="site profile", where="hpcdp-site.toml", remedy=["--site", "hpcdp-site.toml"]):
        load(environ={})
    assert load(path) == load(environ={"HPCDP_SITE": str(path)})
    path.chmod(0o666)
    for found in ({"path": path}, {"environ": {"HPCDP_SITE": str(path)}}):
        with raises(ConfigError, operation="site profile", where="hpcdp-site.toml", got=["hpcdp-site.toml", "every"]):
            load(**found)  # type: ignore[arg-type]


def test_a_profile_may_begin_with_the_mark_of_some_editors(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_bytes(b'\xef\xbb\xbftime = "1"\r\n')
    assert load(path).time == "1"


def test_a_profile_that_the_variable_names_and_is_missing_is_named_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hpcdp-site.toml").write_text('time = "1"')
    with pytest.raises(ConfigError) as raised:
        load(environ={"HPCDP_SITE": "other.toml"})
    assert str(raised.value) == "site profile [HPCDP_SITE=other.toml]: expected a file, got no such file or folder"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            'partitoin = "x"',
            "unknown key 'partitoin' [site.toml]; did you mean 'partition'? valid: launcher, mpi_type,",
        ),
        (f"time = {'9' * 5000}", "expected a TOML file, got an integer of more than 64 bits"),
        (f"env = {{A = [0x{'f' * 5000}]}}", "expected a TOML file, got an integer of more than 64 bits"),
        ("modules = " + "[" * 5000, "expected a TOML file, got tables or lists that are nested too deeply"),
        ('launcher = "mpiexec"', "unknown launcher 'mpiexec' [site.toml]; valid: srun, mpirun"),
        (
            "partition = 3",
            "site profile: partition [site.toml]: expected a name of letters, digits and _.+@:*-, in quotes, got 3",
        ),
        (
            "time = 60",
            "time [site.toml]: expected a time as Slurm writes it, e.g. 04:00:00 or 2-12, minutes and seconds below "
            "60, or 0 for no limit, in quotes, got 60; "
            'write "60"',
        ),
        ("time = 04:00:00", 'or 0 for no limit, in quotes, got 04:00:00; write "04:00:00"'),
        (
            "env = {OMP_PROC_BIND = true}",
            "profile: env.OMP_PROC_BIND [site.toml]: expected text on one line, in quotes",
        ),
        ("env = {A = 1, B = [1]}", "site profile: env.B [site.toml]: expected text on one line, got [1]"),
        ('account = ""', "account [site.toml]: expected text on one line, got ''"),
        ('account = "a\\nb"', "account [site.toml]: expected text on one line, got 'a\\nb'"),
        ('time = "4h"', "minutes and seconds below 60, or 0 for no limit, got '4h'"),
        ('time = "99:99:99"', "minutes and seconds below 60, or 0 for no limit, got '99:99:99'"),
        ('time = "2-12:60"', "got '2-12:60'"),
        ('time = "00:00:00"', "or 0 for no limit, got '00:00:00'"),
        ('mpi_type = "none"', "expected a name such as pmix, with which ranks find each other, got 'none'"),
        ('mpi_type = "pmix;x"', "mpi_type [site.toml]: expected a name such as pmix"),
        ('modules = "gcc"', 'modules [site.toml]: expected a list, e.g. ["a", "b"], got \'gcc\''),
        ("modules = [1]", "modules [site.toml]: expected text on one line, in quotes, got 1"),
        ('sbatch = ["-C ib"]', "sbatch [site.toml]: expected long options with the value after ="),
        ('sbatch = ["--signal=INT"]', "expected no option that a key, a flag or the template sets, got '--signal=INT'"),
        ('partition = "a b"', "partition [site.toml]: expected a name of letters, digits and _.+@:*-, got"),
        ('gres = "gpu:four:2:1"', "gres [site.toml]: expected a name, its type and its number, e.g. gpu:4"),
        ('sbatch = ["--test-only"]', "expected no option that a key, a flag or the template sets, got '--test-only'"),
        ('partition = "--foo"', "partition [site.toml]: expected a name of letters"),
        ('gpu_bind = "rm -rf"', "gpu_bind [site.toml]: expected a word of --gpu-bind, e.g. none or closest"),
        ('sbatch = ["--node=5"]', "expected no option that a key, a flag or the template sets, got '--node=5'"),
        ('sbatch = ["--requeu"]', "expected no option that a key, a flag or the template sets, got '--requeu'"),
        ('sbatch = ["--mem=16X"]', "for --mem a number of MiB, or with K, M, G or T behind it, e.g. 16G, got '--mem=1"),
        ('sbatch = ["--mem"]', "for --mem a number of MiB"),
        ('env = "A=1"', "env [site.toml]: expected a table [env] of variables"),
        ('env = {"A B" = "1"}', "env [site.toml]: expected names of variables, got 'A B'"),
        ("time = ", "site profile [site.toml]: expected a TOML file, got"),
    ],
)
def test_a_mistake_is_one_line(text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("site.toml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        load("site.toml")
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


VALUES = st.recursive(
    st.text(max_size=9) | st.integers() | st.booleans() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


INPUTS = 100_000 if os.environ.get("HPCDP_TEST_THOROUGH") else 100


@settings(max_examples=INPUTS)
@given(st.sampled_from(slurm_scripts.names()), VALUES)
def test_any_value_is_taken_or_refused(name: str, value: object) -> None:
    try:
        kept = Profile(**{name: slurm_scripts._as_kept(name, value)})
    except ConfigError:
        return
    assert kept.launcher in slurm_scripts.LAUNCHERS


@settings(max_examples=INPUTS)
@given(st.binary(max_size=60))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    try:
        load(path)
    except ConfigError as error:
        assert "\n" not in str(error)
