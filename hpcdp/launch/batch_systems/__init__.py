"""Jobs of batch systems: what is submitted, what runs in such a job beside its ranks, what Slurm has given to it."""
