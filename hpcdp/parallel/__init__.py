"""Floor 5: parallel. Imports: nn, autograd, comm, arrays, errors.

One model on several ranks: what data parallelism, where every rank has all of it, cannot do.

- `schedules` says in which order the stages of a pipeline compute micro-batches.
- `pipeline` cuts a model into stages on different ranks, or in one process.
- `links` carry activations and their gradients from stage to stage.
"""

from .pipeline import Pipeline
from .schedules import SCHEDULES

__all__ = ["SCHEDULES", "Pipeline"]
