"""What an enemy, a careless user and bad luck do to runs, models and the server; see `__main__`."""
