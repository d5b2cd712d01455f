"""Predict step time, bytes and memory of dense ZeRO and SCAPE on a cluster; needs neither torch nor a GPU.

python -m deepspeed_scape.plan --params 1.8e9 --nodes 32 --bandwidth 200Gbit --latency 5us --compute-ms 900
"""

from deepspeed_scape.plan.cluster import Cluster
from deepspeed_scape.plan.step import Prediction, Workload, break_even, predict, predict_all

__all__ = ["Cluster", "Prediction", "Workload", "break_even", "predict", "predict_all"]
