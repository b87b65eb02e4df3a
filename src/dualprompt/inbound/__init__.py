"""What comes in from the net: who may ask, how much is taken, uploads, pictures of strangers (extra: serve)."""
