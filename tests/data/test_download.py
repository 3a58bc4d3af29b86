import contextlib
import errno
import fcntl
import gzip
import hashlib
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from raises import raises

from hpcdp.data.catalog import check_md5, fetch, folder_lock
from hpcdp.errors import DataError

CONTENT = gzip.compress(b"real digits" * 1000, mtime=0)
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[str] = []
        self.address = f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        content = CONTENT[:-1] + b"?" if self.path == "/damaged" else CONTENT
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.path == "/slow":
            time.sleep(0.3)
        self.wfile.write(content[:50] if self.path == "/short" else content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def leftovers(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def test_arrives_whole_and_once(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "new" / "mnist" / "file.gz"
    fetch((server.address + "file.gz",), path, MD5)
    assert path.read_bytes() == CONTENT and leftovers(path.parent) == {"file.gz"}
    fetch((server.address + "file.gz",), path, MD5)
    assert server.requests == ["/file.gz"]


def test_the_next_address_is_tried(server: Server, tmp_path: Path) -> None:
    urls = tuple(server.address + name for name in ("missing", "damaged", "short", "good"))
    fetch(urls, tmp_path / "file.gz", MD5)
    assert server.requests == ["/missing", "/damaged", "/short", "/good"]
    assert (tmp_path / "file.gz").read_bytes() == CONTENT and leftovers(tmp_path) == {"file.gz"}


@pytest.mark.parametrize(
    ("name", "got"),
    [("missing", ["HTTP", 404]), ("damaged", "MD5"), ("short", "instead")],
)
def test_failures_leave_nothing_and_say_why(server: Server, tmp_path: Path, name: str, got: object) -> None:
    with raises(DataError, operation="download", where="file.gz", got=got) as caught:
        fetch((server.address + name,), tmp_path / "file.gz", MD5)
    line = str(caught.value)
    assert "\n" not in line and "file.gz" in line and server.address[7:-1] in line
    assert str(tmp_path) in str(caught.value.remedy)  # the line may be cut
    assert leftovers(tmp_path) == set()


def test_no_network_says_so_and_where_to_put_the_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(DataError) as caught:
        fetch((f"http://127.0.0.1:{port}/f",), tmp_path / "mnist" / "f", MD5)
    line = str(caught.value)
    assert "no network" in line and "refused" in line and "\n" not in line
    assert f"put it into {tmp_path / 'mnist'}" in line and "HPCDP_DATA_DIR" in line
    with raises(DataError, operation="download", where="f", got="no-such-host.invalid"):
        fetch(("http://no-such-host.invalid/f",), tmp_path / "f", MD5, timeout_s=5)
    assert list(tmp_path.iterdir()) == []  # neither a lock nor the folder


def test_a_lock_that_a_failed_process_removed_is_made_again(tmp_path: Path) -> None:
    """The second waits for the first, which fails and removes the file whose lock the second then gets."""
    path, entered = tmp_path / "sets" / "mnist", threading.Event()

    def second() -> bool:
        entered.set()
        with folder_lock(path):
            return (path / ".lock").exists()

    with ThreadPoolExecutor(1) as pool:
        with contextlib.suppress(ZeroDivisionError), folder_lock(path):
            waiting = pool.submit(second)
            entered.wait(10)
            time.sleep(0.1)
            raise ZeroDivisionError
        assert waiting.result(10)


def test_a_server_that_does_not_answer(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/f"
        start = time.monotonic()
        with raises(DataError, operation="download", where="f", got=url[len("http://") : -len("/f")]):
            fetch((url,), tmp_path / "f", MD5, timeout_s=0.2)
        assert time.monotonic() - start < 5


FETCH = """
import sys
from pathlib import Path
from hpcdp.data.catalog import fetch
fetch((sys.argv[1],), Path(sys.argv[2]), sys.argv[3])
"""


def test_of_several_processes_one_fetches(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    command = [sys.executable, "-c", FETCH, server.address + "slow", str(path), MD5]
    jobs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    errors = [job.communicate(timeout=30)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * 4, errors
    assert server.requests == ["/slow"] and path.read_bytes() == CONTENT


def test_what_a_killed_process_left_is_overwritten(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.gz.part").write_bytes(b"half")
    fetch((server.address + "good",), tmp_path / "file.gz", MD5)
    assert leftovers(tmp_path) == {"file.gz"}


def test_a_disk_without_room(server: Server, tmp_path: Path) -> None:
    limited = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({len(CONTENT) // 2},) * 2)\n" + FETCH
    command = [sys.executable, "-B", "-c", limited, server.address + "good", str(tmp_path / "f"), MD5]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    last = ended.stderr.splitlines()[-1]
    assert "f]: expected a writeable folder with space, got a file larger than the limit; set HPCDP_DATA_DIR" in last
    assert leftovers(tmp_path) == set()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into any folder")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with raises(DataError, operation="data folder", where=tmp_path / "sub"):
        fetch(("http://127.0.0.1:1/f",), tmp_path / "sub" / "f", MD5)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "mnist").write_text("")
    with (
        raises(DataError, operation="data folder", where=tmp_path / "mnist", remedy="HPCDP_DATA_DIR"),
        folder_lock(tmp_path / "mnist"),
    ):
        pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with raises(DataError, operation="data folder", where=tmp_path / "mnist", remedy="HPCDP_DATA_DIR"):
        fetch(("http://127.0.0.1/x",), tmp_path / "mnist" / "x.gz", MD5)


def test_the_checksum_of_what_cannot_be_read(tmp_path: Path) -> None:
    with raises(DataError, operation="checksum", where=tmp_path):
        check_md5(tmp_path, MD5)


def test_checksum(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(CONTENT)
    check_md5(tmp_path / "f", MD5)
    with raises(DataError, operation="checksum", where=tmp_path / "f", expected=["0" * 32, "MD5"], got=MD5):
        check_md5(tmp_path / "f", "0" * 32)
