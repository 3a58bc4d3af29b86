"""The figures of the document."""

import pytest

from hpcdp.collectives import textbook

MB = 10**6


def test_numbers_of_the_documents():
    assert textbook.through_one_device_s(160 * MB, 4, 16e9) == pytest.approx(60e-3)
    assert textbook.through_host_s(160 * MB, 4, 16e9) == pytest.approx(80e-3)
    assert textbook.sharded_s(160 * MB, 4, 16e9) == pytest.approx(15e-3)
    assert textbook.ring_estimate_s(160 * MB, 3 * 18e9) == pytest.approx(5.93e-3, abs=5e-6)
    assert textbook.ring_s(160 * MB, 8, 3 * 18e9) == pytest.approx(5.19e-3, abs=5e-6)
