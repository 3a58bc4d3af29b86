"""`hpcdp bench`, in the columns of OSU's benchmarks or nccl-tests, and `hpcdp tune`, with what the cost model needs."""
