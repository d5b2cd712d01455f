"""Step times of SCAPE and its peers over a shaped network of namespaces; see `python -m evals.network --help`."""
