"""Horovod's interface, so that its scripts run by changing an import: ``import hpcdp.horovod.torch as hvd``.

- `torch`: the names of Horovod's module for PyTorch.
- `process_sets`: start, numbers of ranks, groups of ranks.
- `operations`: collectives and their handles, also for ranks that run out of data.
- `optimizer`: the optimizer that reduces gradients while backward runs, and broadcasts of states.
"""
