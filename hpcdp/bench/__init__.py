"""`hpcdp bench` and `hpcdp tune`.

- `command`: ``hpcdp bench``, with its options, its tables in the columns of OSU's benchmarks or nccl-tests, and its
  plot.
- `communication`: timings of collectives, and of messages between pairs of ranks, over message sizes.
- `tune`: ``hpcdp tune``, which measures links and algorithms, and predictions of the cost model.
- `measure`: alternating timings, data, sizes, result files and machine facts, also for the programs in ``benchmarks/``.
"""
