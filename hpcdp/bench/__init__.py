"""`hpcdp bench` and `hpcdp tune`.

- `command` is ``hpcdp bench``: its options and what it does; `output` its tables, in the columns of OSU's benchmarks or
  nccl-tests, and its plot.
- `collective` and `point_to_point` time every collective, and messages between pairs of ranks, over message sizes.
- `tune` is ``hpcdp tune``; `probe` measures the links and cores that the cost model needs, and predicts from them.
- `measure` has the timings that alternate, the data and the sizes; `results` the files of figures, and the facts about
  the machine that stand in them. The programs in ``benchmarks/`` use both.
"""
