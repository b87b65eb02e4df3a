"""What the documentation site is made by: its reference from the code, notebooks, drawings, links, pictures."""
