import dataclasses
import os
import threading
import tomllib
from pathlib import Path

import pytest
from raises import raises

from hpcdp import cli
from hpcdp.checkpoint.complete_steps import WriterLock
from hpcdp.cli import train as cli_train
from hpcdp.errors import ConfigError
from hpcdp.kvstore import KINDS
from hpcdp.train import config as runs_config
from hpcdp.train import run_dir
from hpcdp.train.config import TrainConfig


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lrr": 1.0}, "unknown setting 'lrr'; did you mean 'lr'? valid: model, data,"),
        ({"optimizer": "adma"}, "unknown optimizer 'adma'; did you mean 'adam'? valid: sgd, adam, adamw"),
        ({"epochs": "3"}, "setting epochs: expected an integer, got '3'"),
        ({"epochs": True}, "setting epochs: expected an integer, got True"),
        ({"epochs": None}, "setting epochs: expected an integer, got None"),
        ({"epochs": 0}, "setting epochs: expected at least 1, got 0"),
        ({"early_stopping": 0}, "setting early_stopping: expected at least 1, got 0"),
        ({"lr": 0}, "setting lr: expected more than 0, got 0.0"),
        ({"lr": float("nan")}, "setting lr: expected a finite number, got nan"),
        ({"momentum": 1.0}, "setting momentum: expected a number in [0, 1), got 1.0"),
        ({"warmup_epochs": 9, "epochs": 3}, "setting warmup_epochs: expected at most epochs = 3, got 9"),
        ({"kv_store": "dist_sinc"}, "unknown kv_store 'dist_sinc'; did you mean 'dist_sync'?"),
        ({"staleness": 2}, "setting staleness: expected none without kv_store=dist_async, got 2"),
        ({"checkpoint_every": "epochs"}, "setting checkpoint_every: expected an integer or 'epoch', got 'epochs'"),
        ({"checkpoint_every": 0}, "setting checkpoint_every: expected at least 1, got 0"),
        ({"threads": 10**20}, "setting threads: expected at most 1024, got 100000000000000000000"),
        ({"resume": "auto", "overwrite": True}, "setting overwrite: expected false with resume, got true"),
        ({"resume": "a", "run_dir": "b"}, "setting run_dir: expected none with resume=a, got b"),
        (
            {"staleness": 2, "kv_store": "dist_sync"},
            "setting staleness: expected none without kv_store=dist_async, got 2",
        ),
        ({"servers": 1}, "setting servers: expected 0 without kv_store=dist_async, got 1"),
        ({"servers": 1, "kv_store": "dist_sync"}, "setting servers: expected 0 without kv_store=dist_async, got 1"),
        (
            {"servers": 1, "kv_store": "dist_async", "staleness": 0},
            "setting servers: expected 0 with staleness=0, which is dist_sync, got 1",
        ),
        ({"staleness": -1, "kv_store": "dist_async"}, "setting staleness: expected at least 0, got -1"),
        ({"update_on_kvstore": False}, "setting update_on_kvstore: expected true with kv_store=None, got false"),
        ({"update_on_kvstore": False, "kv_store": "dist_async"}, "expected true with kv_store=dist_async, got false"),
        ({"kv_store": "dist_sync", "owner": "rank"}, "setting owner: expected auto with kv_store, got rank"),
        ({"kv_store": "dist_sync", "dtype": "bfloat16"}, "setting dtype: expected float32 with kv_store, got bfloat16"),
        ({"kv_store": "dist_sync", "loss_scale": 8.0}, "setting loss_scale: expected none with kv_store, got 8.0"),
        ({"dtype": "bfloat17"}, "unknown dtype 'bfloat17'"),
        ({"loss_scale": 0}, "setting loss_scale: expected more than 0, got 0.0"),
        ({"loss_scale": "much"}, "setting loss_scale: expected a number or 'dynamic', got 'much'"),
        ({"kv_store": "dist_sync", "clip_norm": 1.0}, "setting clip_norm: expected none with kv_store, got 1.0"),
        (
            {"kv_store": "dist_sync", "reproducible": True},
            "setting reproducible: expected false with kv_store, got true",
        ),
        (
            {"kv_store": "dist_sync", "optimizer": "lars"},
            "setting optimizer: expected sgd, adam or adamw with",
        ),
        (
            {"kv_store": "local", "ranks": 2},
            "setting kv_store: expected dist or dist_sync or dist_device_sync or dist_async for 2 ranks, got local",
        ),
        ({"batch_size": 3, "ranks": 4}, "expected at least one sample for each of the 4 ranks, got 3"),
        ({"run_dir": "runs/\0"}, "setting run_dir: expected a non-empty string without NUL, got 'runs/\\x00'"),
        (
            {"data_dir": "d\udcfc"},
            "setting data_dir: expected a name in UTF-8, which config.toml requires",
        ),
    ],
)
def test_a_bad_setting_is_named(settings: dict, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        runs_config.load(flags=settings)
    assert says in str(caught.value)


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("epochs = 3\nlr = 1\n")
    loaded = runs_config.load(path, {"lr": 0.5})
    assert (loaded.epochs, loaded.lr, loaded.seed) == (3, 0.5, TrainConfig().seed)


def test_a_flag_is_judged_together_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("epochs = 30\n")
    assert runs_config.load(path, {"warmup_epochs": 25}).warmup_epochs == 25
    with raises(ConfigError, operation="setting lr", expected=0, got=-1.0):
        runs_config.load(path, {"lr": -1})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("epoch = 3", "unknown setting 'epoch' ["),
        ("epochs = ", "expected a TOML file, got a syntax error: Invalid value"),
        ("[train]\nepochs = 3", "expected top-level settings without tables, got the table [train]"),
        ("epochs = 0", "setting epochs ["),
        ("optimizer = 'adma'", "unknown optimizer 'adma' ["),
        (f"seed = {'9' * 5000}", "expected a TOML file, got an integer of more than 64 bits"),
        (f"seed = 0x{'f' * 5000}", "expected a TOML file, got an integer of more than 64 bits"),
        (f"seed = {'[' * 5000}", "expected a TOML file, got tables or lists that are nested too deeply"),
        ("".join(f"x{number} = 1\n" for number in range(5000)), "unknown setting 'x0' ["),
        (f"{'x' * 5000} = 1", "unknown setting 'xxx"),
    ],
    ids=range(10),
)
def test_a_bad_file_is_named(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        runs_config.load(path)
    assert says in str(caught.value) and str(path) in str(caught.value) and len(str(caught.value)) < 400


def test_a_missing_file_is_named() -> None:
    with raises(ConfigError, operation="read the configuration", where="/no/such.toml"):
        runs_config.load("/no/such.toml")


def test_a_file_may_begin_with_the_mark_of_some_editors(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbfepochs = 3\n")
    assert runs_config.load(tmp_path / "run.toml").epochs == 3


def test_settings_may_come_through_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    text = "resume = 'auto'\nepochs = 3\n"
    threading.Thread(target=(tmp_path / "pipe").write_text, args=(text,), daemon=True).start()
    taken: list[tuple[TrainConfig, dict]] = []
    monkeypatch.setattr(cli_train, "_train_here", lambda *given: taken.append(given) or 0)
    assert cli.main(["train", "--config", str(tmp_path / "pipe"), "--lr", "0.5"]) == 0
    ((made, said),) = taken
    assert (made.epochs, made.lr, said) == (3, 0.5, {"resume": "auto", "epochs": 3, "lr": 0.5})


def test_toml_is_read_back() -> None:
    awkward = 'a"b\\c\n\té🎲\x7f'
    written = TrainConfig(run_dir=awkward, lr=1e-7, clip_norm=2.0, overwrite=True, ranks=3)
    assert TrainConfig(**tomllib.loads(written.to_toml())) == written


def test_parse_is_the_inverse_of_str() -> None:
    defaults = dataclasses.asdict(TrainConfig())
    given = {name: value for name, value in defaults.items() if value is not None and type(value) is not bool}
    assert {name: runs_config.parse(name, str(value)) for name, value in given.items()} == given
    with raises(ConfigError, operation="setting epochs"):
        runs_config.parse("epochs", "1.5")


def test_ranks_that_contradict_the_launcher() -> None:
    assert TrainConfig().for_world(3).ranks == 3
    assert TrainConfig(ranks=3).for_world(3).ranks == 3
    with raises(ConfigError, operation="setting ranks", expected=2, got=3):
        TrainConfig(ranks=3).for_world(2)


def test_servers_that_contradict_the_launcher() -> None:
    there_are = {"kv_store": "dist_async"}
    assert (
        TrainConfig(servers=2, **there_are).for_world(3, 2).servers
        == TrainConfig(**there_are).for_world(3, 2).servers
        == 2
    )
    assert TrainConfig(servers=0).for_world(3) == TrainConfig().for_world(3) == TrainConfig(ranks=3)
    assert "servers" not in TrainConfig(servers=0).for_world(3).to_toml()
    for said, there in ((1, 2), (0, 2), (1, 0)):
        with raises(ConfigError, operation="setting servers", expected=there, got=said):
            TrainConfig(servers=said, **there_are).for_world(3, there)
    with raises(ConfigError, operation="setting servers", expected=0, got=-1):
        TrainConfig(servers=-1)


def test_new_run_folders_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [run_dir.reserve_run_dir(TrainConfig()).run_dir for _ in range(2)]
    assert folders == ["runs/lenet-digits-001", "runs/lenet-digits-002"]
    run_dir.drop_empty_run_dir(TrainConfig(run_dir=folders[0]))
    assert not Path(folders[0]).exists()


def test_results_are_overwritten_only_when_asked(tmp_path: Path) -> None:
    kept = tmp_path / "notes.txt"
    for name in ("config.toml", "metrics.jsonl", "notes.txt", "curves.png.part", "metrics.jsonl.part"):
        (tmp_path / name).write_text("a result")
    with raises(
        ConfigError, operation="run folder exists and is not empty", where=tmp_path, remedy=["--run-dir", "--overwrite"]
    ):
        run_dir.reserve_run_dir(TrainConfig(run_dir=str(tmp_path)))
    assert len(list(tmp_path.iterdir())) == 5
    run_dir.reserve_run_dir(TrainConfig(run_dir=str(tmp_path), overwrite=True))
    assert list(tmp_path.iterdir()) == [kept]


def test_what_is_no_run_folder_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "photo.png").touch()
    with raises(ConfigError, operation="overwrite the run folder", where=tmp_path, expected="config.toml"):
        run_dir.reserve_run_dir(TrainConfig(run_dir=str(tmp_path), overwrite=True))
    assert (tmp_path / "photo.png").exists()


def test_a_link_to_checkpoints_elsewhere_is_looked_into(tmp_path):
    saved, folder = tmp_path / "scratch" / "step-0000000001", tmp_path / "run"
    saved.mkdir(parents=True)
    folder.mkdir()
    (folder / "checkpoints").symlink_to(saved.parent)
    with raises(ConfigError, operation="run folder exists and is not empty", where=folder):
        run_dir.reserve_run_dir(TrainConfig(run_dir=str(folder)))
    run_dir.drop_empty_run_dir(TrainConfig(run_dir=str(folder)))
    assert saved.exists()
    saved.rmdir()
    run_dir.reserve_run_dir(TrainConfig(run_dir=str(folder)))


def test_a_full_disk_at_the_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, append: bool) -> None:
        assert (folder / "config.toml").exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_dir, "MetricsLog", full)
    reserved = run_dir.reserve_run_dir(TrainConfig(run_dir=str(tmp_path / "run")))
    with raises(ConfigError, operation="write the run folder", where=tmp_path / "run"):
        run_dir.RunFolder(reserved)
    run_dir.drop_empty_run_dir(reserved)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_but_claimed_is_empty_and_that_of_another_job_is_left_alone(tmp_path: Path) -> None:
    config = TrainConfig(run_dir=str(tmp_path / "run"))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    lock = WriterLock(tmp_path / "run" / "checkpoints")
    assert run_dir.reserve_run_dir(config) == config
    run_dir.drop_empty_run_dir(config)
    assert (tmp_path / "run" / "checkpoints" / "writer.lock").exists()
    lock.release()
    run_dir.drop_empty_run_dir(config)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "mine.pt").touch()
    with raises(ConfigError, operation="run folder exists and is not empty", where=tmp_path / "run"):
        run_dir.reserve_run_dir(config)


def test_a_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises(
        ConfigError,
        operation="make the run folder",
        where=tmp_path / "file" / "run",
        got=tmp_path / "file",
    ):
        run_dir.reserve_run_dir(TrainConfig(run_dir=str(tmp_path / "file" / "run")))


@pytest.mark.parametrize("link", ["runs", "run"])
def test_a_link_that_leads_nowhere_is_named(link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(link).symlink_to(tmp_path / "purged" / "runs")
    with raises(ConfigError, operation="make the run folder", where=link, got=tmp_path / link):
        run_dir.reserve_run_dir(TrainConfig(run_dir=None if link == "runs" else link))


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ({"virtual_shards": 8}, {"operation": "setting virtual_shards", "expected": "reproducible", "got": 8}),
        ({"reproducible": True, "threads": 2}, {"operation": "setting threads", "expected": 1, "got": 2}),
        (
            {"reproducible": True, "compression": "fp16"},
            {"operation": "setting compression"},
        ),
        (
            {"reproducible": True, "ranks": 9},
            {"operation": "setting virtual_shards", "expected": 9, "got": 8},
        ),
        (
            {"reproducible": True, "batch_size": 7},
            {"operation": "setting batch_size", "expected": 8},
        ),
        ({"reproducible": True, "virtual_shards": 0}, {"operation": "setting virtual_shards", "expected": 1, "got": 0}),
        ({"reproducible": "yes"}, {"operation": "setting reproducible", "expected": ["true", "false"], "got": "yes"}),
    ],
)
def test_what_keeps_a_run_from_being_reproducible_is_refused(flags, fields):
    with raises(ConfigError, **fields):
        runs_config.load(flags=flags)


def test_a_reproducible_run_is_one_after_it_was_written_down(tmp_path):
    made = runs_config.load(flags={"reproducible": True})
    assert made.virtual_shards == 8
    (tmp_path / "config.toml").write_text(made.to_toml())
    assert runs_config.load(tmp_path / "config.toml") == made
    assert runs_config.load(flags={"reproducible": True, "virtual_shards": 24, "ranks": 12}).virtual_shards == 24
    with raises(ConfigError, operation="setting virtual_shards", expected=12):
        made.for_world(12)


def test_the_kinds_of_stores_are_those_there_are() -> None:
    choices = next(f for f in dataclasses.fields(TrainConfig) if f.name == "kv_store").metadata["choices"]
    assert {*choices, "dist"} == set(KINDS)


@pytest.mark.parametrize(
    "given",
    [
        TrainConfig(kv_store="dist_sync", update_on_kvstore=False),
        TrainConfig(hybridize=False),
        TrainConfig(hybridize=True, reproducible=True, flip=True),
    ],
)
def test_what_is_said_reaches_the_ranks(given: TrainConfig) -> None:
    arguments = cli_train._as_arguments(given)
    parsed = vars(cli._parse(["train", *arguments]))
    flags = {name: runs_config.parse(name, value) for name, value in parsed.items() if name in runs_config.names()}
    assert runs_config.load(flags=flags) == given


def test_what_is_usual_depends_on_the_network():
    images, text = TrainConfig(), TrainConfig(model="gpt")
    assert (images.data, images.optimizer, images.lr, images.shift, images.clip_norm) == (
        "digits",
        "sgd",
        0.05,
        2,
        None,
    )
    assert (text.data, text.optimizer, text.lr, text.shift, text.clip_norm) == ("shakespeare", "adamw", 0.003, 0, 1.0)
    assert TrainConfig(model="char_lstm", optimizer="sgd", clip_norm=5.0).lr == 0.05
    assert TrainConfig(model="char_lstm", kv_store="dist_sync").clip_norm is None
    assert TrainConfig(optimizer="lars").lr == 1.0
    assert TrainConfig(kv_store="dist_async").lr == 0.03
    assert TrainConfig(model="gpt", shift=1).shift == 1


@pytest.mark.parametrize("model", ["mlp", "char_lstm"])
def test_a_network_and_data_that_do_not_fit_are_both_named(model):
    other, valid = ("digits", ["shakespeare"]) if model == "char_lstm" else ("shakespeare", ["cifar10", "digits"])
    with raises(ConfigError, operation="setting data", expected=[model, *valid], got=other):
        TrainConfig(model=model, data=other)
    with raises(ConfigError, operation="unknown model 'gtp'", remedy="gpt"):
        TrainConfig(model="gtp", data="shakespeare")


def test_a_file_as_the_data_set_names_the_way_for_own_files():
    with raises(ConfigError, operation="setting data", got="./train.csv", remedy="write a program"):
        TrainConfig(data="./train.csv")
