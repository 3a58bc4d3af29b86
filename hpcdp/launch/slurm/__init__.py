"""Batch scripts for Slurm, and its queue. Needs no MPI, and Slurm itself only for the queue.

The templates in ``slurm/`` are in bash, with ``@@name`` where a value is filled in.

- `profile`: what a site wants: partition, account, modules, how MPI is started.
- `script`: fills a template in.
- `queue`: submits scripts, asks about jobs and ends them.
- `allocation`: the nodes of the job that this process runs in.
"""
