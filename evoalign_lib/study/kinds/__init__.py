"""The kinds of run: a file a kind, with its specs and what runs them."""
