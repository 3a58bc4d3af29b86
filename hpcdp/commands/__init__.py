"""Floor 8: commands of the command line that are rooms of their own. Imports: benchmarks, checkpoint,
errors, torch, train.

- `checkpoint`: what `hpcdp checkpoint` takes, and does.
- `listing`, `showing`: what its `ls` and `show` print. `texts`: lines that fit a terminal.
- `bytes_bar`: how far long work is.
"""
