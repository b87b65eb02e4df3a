"""Datasets, the decode-once cache, batched augmentation and task streams."""
