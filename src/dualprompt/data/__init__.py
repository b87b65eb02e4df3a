"""Datasets, the decode-once cache, batched augmentation and streams of experiences."""
