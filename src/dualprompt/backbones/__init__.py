"""Frozen vision backbones and the checkpoints they are made from."""
