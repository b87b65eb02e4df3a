"""Tables, figures and studies over finished runs."""
