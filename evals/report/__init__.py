"""A report on training runs: `python -m evals.report RUNS... -o report/`."""
