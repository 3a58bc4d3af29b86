import threading

import pytest

from hpcdp.autograd import Tensor, is_recording, is_training, pause, predict_mode, record, train_mode


def flags():
    return is_recording(), is_training()


def test_contexts_set_the_flags_and_restore_them():
    assert flags() == (False, False)
    with record():
        assert flags() == (True, True)
        with pause():
            assert flags() == (False, False)
            with train_mode():
                assert flags() == (False, True)
        with predict_mode():
            assert flags() == (True, False)
            with record(train_mode=True):
                assert flags() == (True, True)
            assert flags() == (True, False)
        with pause(train_mode=True):
            assert flags() == (False, True)
        assert flags() == (True, True)
    with record(train_mode=False):
        assert flags() == (True, False)
    assert flags() == (False, False)


def test_an_exception_restores_the_flags():
    with pytest.raises(ZeroDivisionError), record():
        raise ZeroDivisionError
    assert flags() == (False, False)


def test_every_thread_has_flags_of_its_own():
    entered, checked = threading.Event(), threading.Event()
    seen = {}

    def other():
        seen["before"] = flags()
        x = Tensor([1.0])
        x.attach_grad()
        with record(train_mode=False):
            entered.set()
            checked.wait(10)
            seen["recorded"] = (x * 2).node is not None
        seen["after"] = flags()

    thread = threading.Thread(target=other)
    with record():
        thread.start()
        assert entered.wait(10)
        assert flags() == (True, True)
    y = Tensor([1.0])
    y.attach_grad()
    assert (y * 2).node is None  # the other thread still records, this one does not
    checked.set()
    thread.join()
    assert seen == {"before": (False, False), "recorded": True, "after": (False, False)}


def test_threads_that_call_a_decorated_function_at_once_keep_their_flags():
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
    seen = {}

    @predict_mode()
    def called(entered, leave):
        entered.set()
        assert leave.wait(10)
        return flags()

    def first():
        with record():
            seen["within first"] = called(first_is_in, second_is_in)
            seen["first"] = flags()
        first_is_out.set()

    def second():
        assert first_is_in.wait(10)
        seen["within second"] = called(second_is_in, first_is_out)
        seen["second"] = flags()

    threads = [threading.Thread(target=each) for each in (first, second)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert seen == {
        "within first": (True, False), "first": (True, True), "within second": (False, False), "second": (False, False)
    }  # fmt: skip
