"""The status of a program is known before it has ended, and nobody else sees that `sys.exit` is another one."""

import argparse
import os
import pickle
import subprocess
import sys

import pytest

from hpcdp.core import environment as process_exit

TELLS = (
    "import atexit, sys, hpcdp; from hpcdp.core.environment import exit_status; "
    "atexit.register(lambda: print(exit_status())); "
)


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit()", 0),
        ("sys.exit(0)", 0),
        ("sys.exit('why')", 1),
        ("sys.exit(259)", 3),
        ("import argparse; argparse.ArgumentParser().parse_args(['--what'])", 2),
        ("exec('try: sys.exit(3)\\nexcept SystemExit as error: assert error.code == 3')", 0),
        ("import threading; each = threading.Thread(target=sys.exit, args=[3]); each.start(); each.join()", 0),
    ],
)
def test_the_status_is_known_at_the_end(ends, told):
    launched = os.environ | {"PMI_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", TELLS + ends], env=launched, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (told, f"{told}\n"), done.stderr


FAILS_LATE = """
import atexit, sys, hpcdp

class Store:
    def end(self):
        raise ArithmeticError("a push that has failed")

store = Store()
hpcdp.init().endings.add(store.end)
atexit.register(print, "goodbye")
"""


@pytest.mark.parametrize(("ends", "status"), [("", 1), ("sys.exit(3)", 3)])
def test_an_exit_function_that_fails_fails_the_program(ends, status):
    launched = os.environ | {"PMI_RANK": "0", "OMPI_MCA_btl": "self,tcp"}
    done = subprocess.run(
        [sys.executable, "-c", FAILS_LATE + ends], env=launched, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (status, "goodbye\n"), done.stderr
    assert done.stderr.count("ArithmeticError: a push that has failed\n") == 1


def test_without_a_launcher_nothing_is_replaced():
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI", "PMI", "SLURM"))}
    code = "import sys; own = sys.exit; import hpcdp; assert sys.exit is own"
    subprocess.run([sys.executable, "-c", code], env=alone, check=True, timeout=60)


def test_what_is_raised_is_taken_for_its_like(monkeypatch):
    monkeypatch.setattr(sys, "exit", sys.exit)
    process_exit.record_exit_status()
    with pytest.raises(SystemExit) as caught:
        sys.exit(5)
    sent = pickle.loads(pickle.dumps(caught.value))
    assert (type(sent), sent.code) == (SystemExit, 5)
    assert repr(caught.value) == "SystemExit(5)"
    with pytest.raises(SystemExit, match="2"):
        argparse.ArgumentParser().parse_args(["--what"])
    assert process_exit.exit_status() == 0
