"""`hpcdp bench` and `hpcdp tune`.

- `command` is ``hpcdp bench``: its options, its tables in the columns of OSU's benchmarks or nccl-tests, and its plot.
- `communication` times every collective, and messages between pairs of ranks, over message sizes.
- `tune` is ``hpcdp tune``: it measures the links and cores that the cost model needs, and predicts from them.
- `measure` has the timings that alternate, the data, the sizes, and the files of figures with the facts about the
  machine. The programs in ``benchmarks/`` use it.
"""
