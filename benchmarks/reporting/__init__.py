"""What the suite has measured against the targets, and RESULTS.md."""
