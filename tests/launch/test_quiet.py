"""Known noise of mpirun is left out to the letter; what is not known passes, whole and in pieces."""

import itertools

import pytest

from hpcdp.launch.mpirun_stderr import Quiet

NOISE = [
    b"[node1:03546] plm:ssh: Warning: setpgid(3549,3549) failed in parent with errno=Permission denied(13)\n",
    b"[warn] Epoll ADD(4) on fd 26 failed.  Old events were 0; read change was 0 (none); write change was 1 (add); "
    b"close change was 0 (none): Bad file descriptor\n",
    b"NBC_Progress: an error 75 was found during schedule 0x7f10ec003f30 at row-offset 69 - aborting the schedule\n",
    b"[warn] Epoll DEL(1) on fd 9 failed. Old events were 6; read change was 0 (none): No such file or directory\n",
    b"[vm:16331] PMIX ERROR: PMIX_ERR_UNREACH in file /a/3rd-party/openpmix/src/server/pmix_server.c at line 3146\n",
    b"srun: cluster configuration lacks support for cpu binding\n",
    b"[node1:01652] PMIX ERROR: PMIX_ERR_UNREACH in file /a/src/mca/ptl/base/ptl_base_connection_hdlr.c at line 121\n",
    b"Abort is in progress...hit ctrl-c again to forcibly terminate\n",
]
RULE = b"-" * 74 + b"\n"
OTHER = [
    b"[node1:03546] plm:ssh: Warning: setpgid(3549,3549) failed in parent with errno=No such process(3)\n",
    b"[node1:03546] plm:ssh: Error: setpgid(0,0) failed in child with errno=Permission denied(13)\n",
    b"[warn] Epoll wait failed: Bad file descriptor\n",
    b"NBC_Progress: an error 12 was found during schedule 0x7f10ec003f30 at row-offset 69 - aborting the schedule\n",
    b"NBC_Progress: an error 75 was found\n",
    b"[vm:16331] PMIX ERROR: PMIX_ERR_NO_PERMISSIONS in file /a/openpmix/src/server/pmix_server.c at line 3146\n",
    b"[vm:16331] PMIX ERROR: PMIX_ERR_UNREACH in file /a/openpmix/src/client/pmix_client.c at line 3146\n",
    b"my [warn] Epoll DEL(1) on fd 9 failed. Old events were 6: No such file or directory\n",
    b"srun: error: Node failure on node2\n",
    b"Abort it\n",
    b"my Abort is in progress...hit ctrl-c again to forcibly terminate\n",
    b"\0 a zero of a rank's own\n",
    b"loss 0.1\rloss 0.2\r\nplain\n\n",
]


def shown(text: bytes, size: int) -> bytes:
    quiet = Quiet()
    return b"".join(quiet.pass_on(text[at : at + size]) for at in range(0, len(text), size)) + quiet.end()


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_noise_is_left_out_and_all_else_is_shown(size: int) -> None:
    assert len(OTHER) >= len(NOISE)
    text = b"".join(one + other for one, other in zip(itertools.cycle(NOISE), OTHER, strict=False))
    assert shown(text, size) == b"".join(OTHER)


@pytest.mark.parametrize("size", [1, 10_000])
def test_the_zero_behind_a_message_of_open_mpi_is_left_out(size: int) -> None:
    assert shown(RULE + b"All nodes are filled.\n" + RULE + b"\0hpcdp launch: so\n", size) == (
        RULE + b"All nodes are filled.\n" + RULE + b"hpcdp launch: so\n"
    )


@pytest.mark.parametrize("size", [1, 10_000])
def test_the_zero_may_come_late_and_comes_once(size: int) -> None:
    message = RULE + b"All nodes are filled.\n" + RULE
    shown_of_it = shown(message + b"a rank\n" + b"\0one\n" + b"\0two\n", size)
    assert shown_of_it == message + b"a rank\none\n\0two\n"
    assert shown(message + message + b"a rank\n" + b"\0\0one\n", size) == message + message + b"a rank\none\n"


@pytest.mark.parametrize("text", [b"50 %", b"continue? [Y/n] ", b"[Y/n] ", b"Password: ", b"Answer: ", b"\rstep 3"])
def test_the_beginning_of_a_line_that_cannot_be_noise_is_shown_at_once(text: bytes) -> None:
    assert Quiet().pass_on(text) == text


def test_an_end_in_the_middle_of_a_line_loses_nothing() -> None:
    assert shown(b"[warn] Epoll AD", 3) == b"[warn] Epoll AD"
