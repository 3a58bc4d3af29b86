"""Networks that are traced once and replayed from a plan."""

from . import tracing
from .cache import Hybrid
from .graph import Graph

__all__ = ["Graph", "Hybrid", "tracing"]
