"""What was not sent is sent later; without memory it is lost."""

import numpy as np
import pytest

from hpcdp.compression import ErrorFeedback, OneBit, TopK, TwoBit

CODECS = [TwoBit(), TwoBit(0.5), OneBit(), TopK(0.05)]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_all_that_was_sent_and_the_residual_make_all_gradients(codec):
    feedback = ErrorFeedback(codec, 5000, np.dtype("f4"), share=1)
    given, sent = np.zeros(5000), np.zeros(5000)
    for step in range(40):
        grad = np.random.default_rng(step).standard_normal(5000).astype("f4") + np.float32(0.1)
        given += grad
        for part in (slice(0, 2000), slice(2000, 5000)):
            wire, out = np.empty(feedback.nbytes(part.stop - part.start), np.uint8), np.empty_like(grad[part])
            feedback.encode(grad[part], part, wire)
            codec.decode(wire, out)
            sent[part] += out
    np.testing.assert_allclose(sent + feedback.residual, given, atol=2e-3)
    assert abs(feedback.residual).mean() < abs(given).mean() * (4 if codec == TwoBit(0.5) else 1.5)


def test_without_memory_small_gradients_are_never_sent():
    grad, out = np.full(100, 0.2, "f4"), np.empty(100, "f4")
    wire = np.empty(TwoBit(0.5).nbytes(100, np.dtype("f4")), np.uint8)
    totals = {}
    for share in (None, 0.5, 0):
        feedback = ErrorFeedback(TwoBit(0.5), 100, np.dtype("f4"), share)
        total = 0.0
        for _ in range(10):
            feedback.encode(grad, slice(0, 100), wire)
            feedback.codec.decode(wire, out)
            total += out[0]
        totals[share] = total
    assert totals == {None: 2.0, 0.5: 0.0, 0: 0.0}  # half of what is left never adds up to more than 0.4
