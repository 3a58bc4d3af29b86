"""A textbook's ways to add up gradients, the documents' figures of them, and the cost model beside them.

Every device has a link of ``bytes_per_s`` in each direction, and there is no latency.

Source: Zhang et al., "Dive into Deep Learning", section 12.7, "Parameter servers".
"""

import pytest

from hpcdp.collectives.cost_model import Link, MachineModel, Topology, predicted_s

MB = 10**6


def through_one_device_s(nbytes: float, devices: int, bytes_per_s: float) -> float:
    """Seconds to aggregate arrays of all devices on one of them, over its link: n - 1 come in, n - 1 results go out."""
    return 2 * (devices - 1) * nbytes / bytes_per_s


def through_host_s(nbytes: float, devices: int, bytes_per_s: float) -> float:
    """Seconds to aggregate them on the host, over its link: all n arrays come in, all n results go out."""
    return 2 * devices * nbytes / bytes_per_s


def sharded_s(nbytes: float, devices: int, bytes_per_s: float) -> float:
    """Seconds to aggregate an n-th of the arrays on each device, with all links in use."""
    return through_one_device_s(nbytes / devices, devices, bytes_per_s)


def ring_s(nbytes: float, devices: int, bytes_per_s: float) -> float:
    """Seconds around a ring: 2 (n - 1) steps, each with one n-th over every link."""
    return 2 * (devices - 1) / devices * nbytes / bytes_per_s


def ring_estimate_s(nbytes: float, bytes_per_s: float) -> float:
    """`ring_s` for many devices."""
    return 2 * nbytes / bytes_per_s


def test_numbers_of_the_documents() -> None:
    assert through_one_device_s(160 * MB, 4, 16e9) == pytest.approx(60e-3)
    assert through_host_s(160 * MB, 4, 16e9) == pytest.approx(80e-3)
    assert sharded_s(160 * MB, 4, 16e9) == pytest.approx(15e-3)
    assert ring_estimate_s(160 * MB, 3 * 18e9) == pytest.approx(5.93e-3, abs=5e-6)
    assert ring_s(160 * MB, 8, 3 * 18e9) == pytest.approx(5.19e-3, abs=5e-6)


@pytest.mark.parametrize(("ranks", "bytes_per_s", "ms"), [(8, 3 * 18e9, 5.19), (4, 16e9, 15.0)])
def test_the_model_of_a_ring_gives_them_too(ranks: int, bytes_per_s: float, ms: float) -> None:
    nothing, link = Link(0.0, 0.0, 0.0), Link(0.0, 1 / bytes_per_s, 1 / bytes_per_s)
    free = MachineModel(nothing, link, 0.0, 0.0, 0.0, 0.0, 0.0)
    predicted = predicted_s("allreduce", "ring", 160 * MB, Topology((1,) * ranks), free)
    assert 1e3 * predicted == pytest.approx(ms, abs=5e-3)
    assert predicted == pytest.approx(ring_s(160 * MB, ranks, bytes_per_s), rel=1e-3)
