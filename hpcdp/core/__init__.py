"""Foundations of every package: arrays, devices, the environment of a process, and files."""
