"""A model bound to the form of its data: its runs, its prior, its likelihood, and what is checked of them."""
