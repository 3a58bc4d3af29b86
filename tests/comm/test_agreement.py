import pytest

from hpcdp.checkpoint import Manager
from hpcdp.comm import thread_comm
from hpcdp.comm.consistency import first_difference, on_every_rank, on_rank_0, require_same
from hpcdp.errors import ConfigError, DataError, MismatchError


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_results_are_each_ranks_own(n):
    assert thread_comm.run(n, lambda world: on_every_rank(world.comm, lambda: world.rank * 10)) == [
        10 * r for r in range(n)
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_rank_0_alone_calls_and_all_get_its_result(n):
    called = []

    def job(world):
        return on_rank_0(world.comm, lambda: called.append(world.rank) or {"run_dir": "runs/a"})

    assert thread_comm.run(n, job) == [{"run_dir": "runs/a"}] * n
    assert called == [0]


def test_one_ranks_error_is_raised_on_all_and_names_it():
    def job(world):
        def read():
            if world.rank == 2:
                raise DataError("read", where="train.gz", expected="1797 images", got=3, remedy="fetch it again")

        with pytest.raises(DataError) as caught:
            on_every_rank(world.comm, read)
        return str(caught.value)

    line = "rank 2: read [train.gz]: expected 1797 images, got 3; fetch it again"
    assert thread_comm.run(4, job) == [line] * 4


def test_an_error_of_all_ranks_names_none():
    def job(world):
        def read():
            raise ConfigError("unknown model 'x'", remedy="valid: a, b")

        with pytest.raises(ConfigError) as caught:
            on_every_rank(world.comm, read)
        return str(caught.value)

    assert thread_comm.run(3, job) == ["unknown model 'x'; valid: a, b"] * 3


def test_an_error_of_rank_0_reaches_ranks_that_did_not_call():
    def job(world):
        def make():
            assert world.rank == 0
            raise ConfigError("run folder exists", where="runs/a")

        with pytest.raises(ConfigError) as caught:
            on_rank_0(world.comm, make)
        return str(caught.value)

    assert thread_comm.run(3, job) == ["run folder exists [runs/a]"] * 3


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    "other",
    [
        lambda comm: on_rank_0(comm, len),
        lambda comm: require_same(comm, "save", ["a"]),
        lambda comm: comm.allgather_json("of nobody"),
    ],
)
def test_ranks_that_do_other_things_together_are_named(other, n):
    def job(world):
        if world.rank == n - 1:
            try:
                return str(other(world.comm))
            except MismatchError as error:
                return str(error)
        with pytest.raises(MismatchError) as caught:
            on_every_rank(world.comm, lambda: world.rank)
        return str(caught.value)

    messages = thread_comm.run(n, job)
    assert len({*messages[:-1]}) == 1
    assert "expected on_every_rank as on rank 0, got " in messages[0] and f"on rank {n - 1}" in messages[0]


def test_a_call_of_one_rank_alone_is_named_by_the_next_of_all(tmp_path):
    def job(world):
        with Manager(tmp_path, world) as manager:
            with pytest.raises(MismatchError) as caught:
                if world.rank == 1:
                    manager.latest()
                manager.save(1, {})
            return str(caught.value)

    (messages,) = {*thread_comm.run(3, job)}
    assert "expected Manager.save as on rank 0, got Manager.latest on rank 1" in messages


def test_another_exception_is_no_agreement():
    def job(world):
        def fail():
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            on_every_rank(world.comm, fail)

    thread_comm.run(1, job)


def test_of_long_texts_the_words_that_differ_are_shown():
    same = " ".join(f"setting{i}={i}" for i in range(30))
    error = first_difference("Trainer", [f"{same} scale=1 {same}"], [f"{same} scale=12 {same}"], [1], "alike")
    assert (error.expected, error.got) == (
        "... setting29=29 scale=1 ... as on rank 0",
        "... setting29=29 scale=12 ... on rank 1",
    )
    error = first_difference("fit", [f"callbacks Early {same}"], [f"callbacks Adapt, Early {same}"], [1], "alike")
    assert (error.expected, error.got) == ("callbacks Early ... as on rank 0", "callbacks Adapt, Early ... on rank 1")
    short = first_difference("Trainer", ["a b c"], ["a d c"], [1], "alike")
    assert (short.expected, short.got) == ("a b c as on rank 0", "a d c on rank 1")
