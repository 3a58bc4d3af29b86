"""Servers of asynchronous stores."""
