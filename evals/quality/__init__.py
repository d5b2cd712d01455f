"""The quality proof: tuned dense training against SCAPE and its ablations; see `python -m evals.quality --help`."""
