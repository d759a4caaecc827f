"""The study: how the runs of this paper are specified, made and kept."""
