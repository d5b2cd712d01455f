"""Downstream tasks on our checkpoints with lm-eval, offline: `python -m evals.downstream CHECKPOINT...`."""
