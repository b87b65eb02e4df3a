"""Many runs: a store of them, searches over settings, and the paper's main table."""
