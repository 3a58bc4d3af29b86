"""Programs whose tasks outlast what waits for them."""

import os
import subprocess
import sys
import textwrap

SPIN = "hashlib.pbkdf2_hmac('sha256', b'a', b'b', 60_000_000)"
"""A task that spins in C without the GIL for a minute."""


def script(text):
    command = [sys.executable, "-c", "import hashlib, os, sys, threading, time\n" + textwrap.dedent(text)]
    environment = {name: value for name, value in os.environ.items() if name != "HPCDP_ENGINE"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
