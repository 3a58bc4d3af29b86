"""What every package builds on: arrays, devices, the environment of a process, and files."""
