"""From the gradients of each rank's samples to one update by all: `trainer`, by buckets or by a key-value store."""
