"""The dependency engine, and traces of what a rank ran.

A task is pushed with the variables that it reads and writes. It runs on a thread of its lane as soon as earlier tasks
on those variables allow: readers of a variable run together, a writer runs alone, in the order of pushing. The design
is that of MXNet's dependency engine (Chen et al., "MXNet: A Flexible and Efficient Machine Learning Library for
Heterogeneous Distributed Systems", 2015, section 3.2).
"""

from .engine import Done, Engine, Observer, default_engine
from .scheduler import Variable

__all__ = ["Done", "Engine", "Observer", "Variable", "default_engine"]
