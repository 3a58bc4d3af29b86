"""Floor 7: slurm. Imports: launch, train, toml, errors, permissions.

Batch scripts for Slurm, and its queue. Needs no MPI, and Slurm itself only for the queue.

- `train.sbatch`, `train-gpu.sbatch`, `sweep.sbatch`, `benchmark.sbatch`, `interactive.sh` are the templates, in bash
  with ``@@name`` where something is filled in; `ranks.sh` is what those that can be stopped and resumed have in common.
- `profile` is what a site wants: partition, account, modules, how MPI is started.
- `script` fills a template in.
- `queue` submits scripts, and asks about jobs and ends them.
"""
