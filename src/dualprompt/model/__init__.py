"""A model that people teach: images taken in, the network that answers, and the model on disk and on the hub."""
