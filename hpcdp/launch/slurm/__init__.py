"""Batch scripts for Slurm, and its queue. Needs no MPI, and Slurm itself only for the queue.

- The templates are data, in the folder ``slurm`` (`hpcdp.data_files`): `train.sbatch`, `train-gpu.sbatch`,
  `sweep.sbatch`, `benchmark.sbatch`, `interactive.sh`, in bash with ``@@name`` where something is filled in, and
  `ranks.sh`, which those include that can be stopped and resumed.
- `profile` is what a site wants: partition, account, modules, how MPI is started.
- `script` fills a template in.
- `queue` submits scripts, and asks about jobs and ends them.
"""
