"""Files that are replaced whole or not at all."""

import os

import pytest

from hpcdp.replacing import own_part_of, part_of, replaced


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
    with pytest.raises(IsADirectoryError), replaced(tmp_path / "a", tmp_path / "of-mine") as part:
        part.write_text("whole")
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_several_processes_may_write_one_file_at_a_time(tmp_path):
    path = tmp_path / "a"
    with replaced(path, own_part_of(path)) as part:
        part.write_text("half")
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0 and path.read_text() == "of another"
        else:
            with replaced(path, own_part_of(path)) as own:
                own.write_text("of another")
            os._exit(0)
        part.write_text("whole")
    assert path.read_text() == "whole" and list(tmp_path.iterdir()) == [path]


def test_what_stands_in_the_way_is_what_the_error_is_about(tmp_path):
    (tmp_path / "a.part").mkdir()
    with pytest.raises(IsADirectoryError, match=r"a\.part"), replaced(tmp_path / "a") as part:
        part.write_text("")
    assert [each.name for each in tmp_path.iterdir()] == ["a.part"]
