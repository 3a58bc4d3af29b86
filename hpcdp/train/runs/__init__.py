"""What ``hpcdp train`` does: the settings of a run, its folder, what it goes on with, and the run itself."""
