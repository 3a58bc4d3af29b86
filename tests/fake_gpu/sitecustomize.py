"""What Python imports in each process that has this folder in ``PYTHONPATH``, ranks too: see `fake_gpu`."""

import os

if os.environ.get("FAKE_GPU"):
    import fake_gpu

    fake_gpu.install()
