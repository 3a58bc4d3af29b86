"""Hybrid programming: a network's calls traced to a graph, the graph made a plan, and the plan replayed.

`tracing` notes which operators a forward calls, `graph` is what it finds, `rewriting` makes it shorter, `plan` computes
it again and again in the same memory, and `hybrid` chooses the plan for a call.
"""

from . import changed
from .graph import Graph
from .hybrid import Hybrid

__all__ = ["Graph", "Hybrid", "changed"]
