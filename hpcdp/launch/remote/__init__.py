"""The other hosts of a job: a guard on each, the launcher's way to it, and copies of the working folder."""
