import errno
import fcntl
import io
import os
import pickle
import pty
import struct
import subprocess
import sys
import termios

import numpy as np
import pytest

from hpcdp import autograd, errors, kvstore, nn, optim
from hpcdp.core.files import require_file
from hpcdp.data.catalog import read_idx
from hpcdp.errors import (
    LONGEST_LINE,
    ConfigError,
    HpcdpError,
    UnsupportedError,
    listed,
    reason,
    report_directly,
    shortened,
    to_stderr,
    wrapped,
)


def test_an_error_is_one_line_with_all_its_parts():
    error = ConfigError("read", where="a.toml", expected="a number", got="'x\n y'", remedy="fix it", rank=3)
    assert str(error) == "rank 3: read [a.toml]: expected a number, got 'x y'; fix it"


@pytest.mark.parametrize(
    ("parts", "text"),
    [({}, "op"), ({"got": 0}, "op: got 0"), ({"expected": 1}, "op: expected 1"), ({"remedy": "r"}, "op; r")],
)
def test_parts_that_are_missing_leave_no_trace(parts, text):
    assert str(HpcdpError("op", **parts)) == text


def test_what_others_have_said_does_nothing_to_a_terminal():
    error = ConfigError("push", where="key '\x07'", got="ValueError: \x1b[31mred\u202e\n  and on, Zürich")
    assert str(error) == r"push [key '\x07']: got ValueError: \x1b[31mred\u202e and on, Zürich"


def test_an_error_survives_a_copy_with_its_kind():
    error = pickle.loads(pickle.dumps(ConfigError("op", where="w", got=1)))
    assert type(error) is ConfigError
    assert str(error) == "op [w]: got 1"
    error.add_note("in a test")
    error.attempt = 2
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.__notes__, again.attempt) == ("op [w]: got 1", ["in a test"], 2)


@pytest.mark.parametrize(
    ("kind", "built_in"),
    [
        (errors.ConfigError, ValueError), (errors.MissingKeyError, KeyError), (errors.MissingKeyError, ValueError),
        (errors.LaunchError, RuntimeError), (errors.MismatchError, RuntimeError), (errors.DataError, ValueError),
        (errors.MissingFileError, FileNotFoundError), (errors.SaveError, OSError), (errors.ArrayMixError, TypeError),
        (errors.DeviceError, RuntimeError), (errors.UnsupportedError, ValueError),
        (errors.NonFiniteGradientError, FloatingPointError), (errors.StaleGradientError, RuntimeError),
        (errors.WorldAborted, RuntimeError),
    ],
)  # fmt: skip
def test_an_error_is_the_built_in_that_users_catch(kind, built_in):
    with pytest.raises(built_in) as caught:
        raise kind("pull", where="key 'w'", got="none", remedy="call init('w', value)", rank=1)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is kind and isinstance(copy, HpcdpError)
    assert str(copy) == str(caught.value) == "rank 1: pull [key 'w']: got none; call init('w', value)"


def test_every_error_is_also_a_built_in():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HpcdpError)]
    own = [kind for kind in kinds if kind is not HpcdpError]
    assert len(own) == 14 and not [kind for kind in own if all(base is HpcdpError for base in kind.__bases__)]


def test_files_and_keys_that_are_missing_can_be_caught_as_such(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_idx(tmp_path / "train-images")
    with pytest.raises(FileNotFoundError):
        require_file("read csv", tmp_path / "a.csv")
    with pytest.raises(FileNotFoundError):
        nn.SymbolBlock.load(tmp_path / "net")
    store = kvstore.create("local")
    store.set_optimizer(optim.SGD(lr=0.1))
    with pytest.raises(FileNotFoundError):
        store.load_optimizer_states(tmp_path / "states")
    with pytest.raises(KeyError, match="init"):
        store.pull("w", out=np.zeros(1))


def test_an_error_raised_within_an_operator_keeps_its_kind():
    """Operators turn NumPy's ValueError into an `UnsupportedError`; ours has named its operator already."""
    with pytest.raises(UnsupportedError) as caught:
        autograd.Tensor(np.zeros((2, 3))).transpose(0, 5)
    assert caught.value.operation == "transpose" and caught.value.where == "axes"


@pytest.mark.parametrize(("text", "shown"), [("", ""), ("a" * 7, "a" * 7), ("a" * 8, "aaaa...")])
def test_long_texts_are_cut_to_as_many_characters_as_there_may_be(text, shown):
    assert shortened(text, 7) == shown


@pytest.mark.parametrize(
    ("names", "most", "shown"),
    [([], 3, ""), ("ab", 2, "a, b"), ("abcd", 3, "a, b, c and 1 more"), (range(9), 2, "0, 1 and 7 more")],
)
def test_of_many_names_the_first_are_listed(names, most, shown):
    assert listed(names, most) == shown


def test_a_line_reaches_stderr_in_one_piece(monkeypatch):
    """As where PYTHONUNBUFFERED is set."""
    written = []

    class Raw(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            written.append(bytes(data))
            return len(data)

    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(Raw(), "utf-8", write_through=True))
    to_stderr("rank 1 of 2: interrupted")
    assert written == [b"rank 1 of 2: interrupted\n"]


@pytest.mark.parametrize("place", ["own", "buffer", "closed", "none", "file", "tee"])
def test_a_report_reaches_descriptor_2_whatever_stands_in_stderr(place, tmp_path, monkeypatch, capfd):
    """Once, and a log file that the program has put there as well."""
    log = open(tmp_path / "log", "w")  # noqa: SIM115
    with open(2, "w", closefd=False) as own:

        class Tee(io.StringIO):
            def write(self, text):
                own.write(text)
                own.flush()
                return log.write(text)

        closed = io.StringIO()
        closed.close()
        streams = {"own": own, "buffer": io.StringIO(), "closed": closed, "none": None, "file": log, "tee": Tee()}
        monkeypatch.setattr("sys.stderr", streams[place])
        report_directly("rank 1 of 2 failed:\n\udc80")
        log.close()
    assert capfd.readouterr().err == "rank 1 of 2 failed:\n\\udc80\n"
    assert (tmp_path / "log").read_text().count("rank 1 of 2 failed") == (place in ("file", "tee"))


@pytest.mark.parametrize("long", ["operation", "where", "expected", "got", "remedy"])
def test_a_line_is_cut_where_it_is_longest_and_its_parts_stay_whole(long):
    short = {"operation": "read", "where": "a.toml", "expected": "a number", "got": "none", "remedy": "fix it"}
    error = ConfigError(**{**short, long: "begin" + "\x07" * 5000 + "end"})
    line = str(error)
    assert len(line) <= LONGEST_LINE and "begin" in line and " ... " in line and "end" in line
    assert all(text in line for name, text in short.items() if name != long)
    assert len(getattr(error, long)) == 5008


def test_a_line_whose_parts_are_all_long_keeps_some_of_each():
    parts = {name: f"{name} " + name[0] * 900 for name in ("where", "expected", "got", "remedy")}
    line = str(HpcdpError("read", rank=3, **parts))
    assert len(line) <= LONGEST_LINE and all(name in line for name in parts)


def test_a_long_message_fits_the_terminal_and_its_remedy_begins_a_line():
    text = "hpcdp: launch: expected a program after --; add it, e.g. `hpcdp launch -n 2 -- python train.py --epochs 3`"
    assert wrapped(text, 60).splitlines() == [
        "hpcdp: launch: expected a program after --;",
        "add it, e.g.",
        "`hpcdp launch -n 2 -- python train.py --epochs 3`",
    ]
    assert wrapped(text, 0) == wrapped(text, len(text)) == text
    assert wrapped(f"{text}\n  a stack", 60) == f"{text}\n  a stack"


def test_only_a_terminal_changes_a_message():
    terminal, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("4H", 24, 40, 0, 0))
    program = """
from hpcdp.errors import report_directly, to_stderr
for say in to_stderr, report_directly:
    say("hpcdp: " + "word " * 9)
"""
    shown = subprocess.run([sys.executable, "-c", program], stderr=screen, timeout=60)
    os.close(screen)
    assert shown.returncode == 0
    assert (
        os.read(terminal, 1000).decode().splitlines() == ["hpcdp: word word word word word word", "word word word"] * 2
    )
    os.close(terminal)
    piped = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=60)
    assert piped.stderr == ("hpcdp: " + "word " * 9 + "\n") * 2


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOENT, os.strerror(errno.ENOENT)), "no such file or folder"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), "a read-only file system"),
        (OSError(errno.ENOENT, "a text of its own"), "a text of its own"),
        (OSError("no number"), "no number"),
    ],
)
def test_what_the_system_refuses_is_a_noun_phrase(error, words):
    assert reason(error) == words
