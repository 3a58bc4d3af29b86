"""Floor 8: commands of the command line that are rooms of their own. Imports: checkpoint,
errors, launch, torch, train.

- `checkpoint`: what `hpcdp checkpoint` takes, and does.
- `listing`, `showing`: what its `ls` and `show` print. `texts`: lines that fit a terminal.
- `launch`: what `hpcdp launch` takes; the room of that name does it.
- `bytes_bar`: how far long work is.
- `report`: what `hpcdp report` takes, and writes.
- `slurm`: what `hpcdp slurm` takes, and does.
"""
