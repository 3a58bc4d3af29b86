"""What a textbook's ways to add up gradients cost: figures beside which `cost` can be held; nothing chooses by them.

Every device has a link of ``bytes_per_s`` in each direction, and there is no latency.

Source: Zhang et al., "Dive into Deep Learning", section 13.7, "Parameter servers".
"""

from __future__ import annotations


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
