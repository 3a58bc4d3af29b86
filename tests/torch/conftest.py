"""One thread for each rank: thread ranks and real ranks share the cores already."""

import importlib.util

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Not when files are collected: where no test of theirs is run, torch is not imported."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
