"""A rank of the test that cuts the wire: trains until it is told otherwise."""

from __future__ import annotations

import os
from pathlib import Path

from tests import worker


def main() -> None:
    from tests.dist import odd_model
    from tests.dist.rank_faults import start

    worker.init(timeout=30)
    engine = start()
    with engine.optimizer.roster.watch(
        "training"
    ):  # as launch/pretrain.py: the cut may meet a collective of the script
        for step in range(100_000):
            odd_model.train_step(engine, step)
            if step == 20:
                Path(os.environ["READY"]).touch()


if __name__ == "__main__":
    main()
