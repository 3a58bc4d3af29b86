"""Batches that differ on every rank, what one process makes of those of all ranks, and when two models are alike."""

import threading

import numpy as np
import torch
from torch import nn

SEEDING = threading.Lock()
"""All thread ranks draw from one generator."""


def batch(step, rank):
    rng = np.random.default_rng([step, rank])
    return torch.from_numpy(rng.standard_normal((5, 6), "f4")), torch.from_numpy(rng.integers(0, 4, 5))


def loss_of(model, step, rank):
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x), y)


def alike(ours, theirs, atol=1e-5):
    return all(torch.allclose(a, b, atol=atol) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def add_average(reference, step, ranks):
    """Adds the mean over ``ranks`` of the gradients of ``reference`` to those that it has."""
    for rank in range(ranks):
        (loss_of(reference, step, rank) / ranks).backward()
