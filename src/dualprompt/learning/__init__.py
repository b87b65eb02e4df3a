"""What the learner is made of: results, pictures, the network that answers, and how a model is kept."""
