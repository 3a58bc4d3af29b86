"""One thread for each rank: thread ranks and real ranks share the cores already."""

import importlib.util

if importlib.util.find_spec("torch") is not None:
    import torch

    torch.set_num_threads(1)
