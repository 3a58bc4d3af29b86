"""What others have left behind: when it is gone."""

import subprocess
import sys

ENDS_MEANWHILE = """
import os
from hpcdp.launch import process_monitor as orphans
child = os.posix_spawn("/bin/true", ["true"], {})
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
waitpid, asked = os.waitpid, []

def not_yet(*what):
    asked.append(what)
    return waitpid(*what) if len(asked) > 1 else (0, 0)

os.waitpid = not_yet
orphans.end_orphans()
try:
    raise SystemExit(f"waitpid(2) gives {waitpid(-1, os.WNOHANG)}")
except ChildProcessError:
    pass
"""


def test_what_has_just_ended_is_waited_for() -> None:
    """Else it is left to the init of a container, which may take seconds."""
    done = subprocess.run([sys.executable, "-c", ENDS_MEANWHILE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
