"""What the notebooks show: their answers in words, the rows of their tables, and how their figures are drawn."""
