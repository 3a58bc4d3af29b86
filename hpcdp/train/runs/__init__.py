"""The runs of ``hpcdp train``."""
