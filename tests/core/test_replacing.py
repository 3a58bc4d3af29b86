"""Files that are replaced whole or not at all."""

import os

import pytest

from hpcdp.core.files import own_part_of, part_of, replaced


def test_a_file_takes_its_place_when_it_is_written(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("before")
    with replaced(path) as part:
        part.write_text("after")
        assert path.read_text() == "before" and part == part_of(path)
    assert path.read_text() == "after" and list(tmp_path.iterdir()) == [path]


def test_it_has_the_permissions_of_a_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        with replaced(tmp_path / "a") as part:
            part.write_text("")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_of_a_link_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "latest").symlink_to("runs/a")  # not there yet
    for text in ("first", "second"):
        with replaced(tmp_path / "latest") as part:
            part.write_text(text)
        assert (tmp_path / "runs" / "a").read_text() == text and os.readlink(tmp_path / "latest") == "runs/a"
    assert len(list(tmp_path.iterdir())) == 2 and len(list((tmp_path / "runs").iterdir())) == 1


def test_a_pipe_is_written_to_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reads = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with replaced(tmp_path / "pipe") as part:
        part.write_text("all of it")
    assert os.read(reads, 100) == b"all of it" and (tmp_path / "pipe").is_fifo()
    os.close(reads)
    with pytest.raises(ValueError), replaced(tmp_path / "pipe"):
        raise ValueError
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_a_block_that_raises_leaves_what_was_there_and_nothing_beside(error, tmp_path):
    path = tmp_path / "a"
    path.write_text("before")
    with pytest.raises(error), replaced(path) as part:
        part.write_text("half")
        raise error
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_take_its_place_is_removed(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError), replaced(tmp_path / "a", own_part_of) as part:
        part.write_text("whole")
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_several_processes_may_write_one_file_at_a_time(tmp_path):
    path = tmp_path / "a"
    with replaced(path, own_part_of) as part:
        part.write_text("half")
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0 and path.read_text() == "of another"
        else:
            with replaced(path, own_part_of) as own:
                own.write_text("of another")
            os._exit(0)
        part.write_text("whole")
    assert path.read_text() == "whole" and list(tmp_path.iterdir()) == [path]


def test_what_stands_in_the_way_is_what_the_error_is_about(tmp_path):
    (tmp_path / "a.part").mkdir()
    with pytest.raises(IsADirectoryError, match=r"a\.part"), replaced(tmp_path / "a") as part:
        part.write_text("")
    assert [each.name for each in tmp_path.iterdir()] == ["a.part"]
