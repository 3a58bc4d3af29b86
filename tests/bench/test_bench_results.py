"""Files of figures are refused early, written all or nothing, and devices stay devices."""

import os
from pathlib import Path

import pytest
from raises import raises

from hpcdp.bench import measure
from hpcdp.errors import ConfigError


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")

    def full(part: Path, data: bytes) -> int:
        part.open("wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with raises(ConfigError, where=path, got="no space left on device"):
        measure.write(str(path), "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_links_stay_and_devices_are_written_in_place(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    measure.check_writable("test", [str(link), None, "", "/dev/null"])
    assert list(tmp_path.iterdir()) == [link]
    for content in ("first", b"second"):
        measure.write(str(link), content)
    measure.write("/dev/null", "third")
    assert link.is_symlink()
    assert target.read_text() == "second"
    assert not Path("/dev/null").is_file()


def test_the_check_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    before = os.stat(path).st_mtime_ns
    measure.check_writable("test", [str(path), str(tmp_path / "new")])
    assert list(tmp_path.iterdir()) == [path]
    assert os.stat(path).st_mtime_ns == before
    with raises(ConfigError, operation="test", where=tmp_path / "nowhere" / "new"):
        measure.check_writable("test", [str(tmp_path / "nowhere" / "new")])
