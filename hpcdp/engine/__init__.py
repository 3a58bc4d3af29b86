"""The dependency engine, and the trace of what ran when.

Work is pushed with the variables that it reads and writes; it runs on a thread of a lane as soon as everything pushed
before it that touches those variables allows: readers of a variable together, a writer alone, in the order of pushing.
The design is that of MXNet's dependency engine (Chen et al., "MXNet: A Flexible and Efficient Machine Learning Library
for Heterogeneous Distributed Systems", 2015, section 3.2).
"""

from .engine import Done, Engine, Observer, default_engine
from .scheduler import Variable

__all__ = ["Done", "Engine", "Observer", "Variable", "default_engine"]
