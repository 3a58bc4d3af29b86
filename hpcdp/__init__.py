"""Floor 8: the public face. Imports: every room, each only when it is first used."""

__version__ = "0.1.0"
