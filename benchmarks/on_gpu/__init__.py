"""What `gpu` runs on a GPU: jobs of ranks, kernels, networks; and its part of RESULTS.md."""
