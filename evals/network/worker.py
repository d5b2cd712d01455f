"""A rank: holds all methods side by side and runs what it is asked to, one block at a time.

Started by `ranks.py` with one end of a socket pair; requests and replies are plain dicts. Every rank gets the same
requests, so the collectives inside line up.
"""

from __future__ import annotations

import os
import statistics
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from launch.lifeline import die_with_parent

CONTROL = "SCAPE_NETWORK_CONTROL"  # environment: the file descriptor of our end

VERBS = ("build", "block", "probe", "drop", "train", "evaluate", "timeline", "leave")


def join() -> tuple[int, int]:
    """Start gloo through DeepSpeed. Returns (rank, world size)."""
    import deepspeed
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # would be compiled at the first start: half a minute of C++ for messages that stay on one host
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False, timeout=timedelta(seconds=300))
    return dist.get_rank(), dist.get_world_size()


class Rank:
    """The methods of one rank and the data they train on."""

    def __init__(self, request: dict[str, Any]) -> None:
        from launch.batches import BatchOrder, count_windows
        from launch.tokens import open_tokens

        self.rank, self.world = join()
        self.preset, self.seq, self.micro_batch = request["preset"], request["seq"], request["micro_batch"]
        self.data = open_tokens(Path(request["cache"]), request["tokens_key"])
        self.order = BatchOrder(
            seed=0,
            windows=count_windows(len(self.data.train), self.seq),
            world=self.world,
            micro_batch=self.micro_batch,
        )
        self.methods: dict[str, Any] = {}
        self.lr: dict[str, float] = {}
        self.watched: dict[str, Any] = {}
        self.steps: dict[str, int] = {}  # of each method so far, so that all see the same data in the same order

    def batch(self, step: int) -> Any:  # (B, seq + 1) int64
        import torch

        from launch.batches import read_windows

        return torch.from_numpy(read_windows(self.data.train, self.order.windows_of(step, self.rank), self.seq))

    def build(self, request: dict[str, Any]) -> dict[str, Any]:
        """Build one method, or several with the names given."""
        import torch

        from evals.network.methods import LR, METHODS, build
        from launch.models import build_model, count_parameters

        def model() -> Any:
            torch.manual_seed(0)
            return build_model(self.preset, vocab=self.data.meta["vocab"], seq=self.seq)

        method = METHODS[request["method"]]
        self.methods[method.name] = build(
            method,
            model,
            rank=self.rank,
            world=self.world,
            micro_batch=self.micro_batch,
            mock_bytes=int(request.get("mock_bytes", 0)),
            lr=request.get("lr", LR),
            dense_first=bool(request.get("dense_first", False)),
        )
        self.lr[method.name] = request.get("lr", LR)
        self.steps[method.name] = 0
        return {"params": count_parameters(model())}

    def block(self, request: dict[str, Any]) -> dict[str, Any]:
        """Some consecutive steps of one method, between two barriers.

        ``lead`` steps come before the clock starts, so that an overlapped message in flight at the start stands for
        the one in flight at the end. With ``meet`` the ranks meet after every step. Returns ms of each step, mean ms of
        their forwards and backwards, and bytes a step by the interface and by SCAPE's counter.
        """
        import torch.distributed as dist

        from evals.network.hosts import interface_bytes

        name, lead, steps = request["method"], request["lead"], request["steps"]
        trained, counted, laps = self.methods[name], 0.0, []
        forward, compute = [], []
        dist.barrier()
        sent = interface_bytes()
        for _ in range(lead):
            self._step(name)
            counted += trained.stats().get("bytes_total", 0.0)
        clock = [time.perf_counter()]
        for _ in range(steps):
            self._step(name)
            if request["meet"]:
                dist.barrier()
            forward.append(trained.forward_ms)
            compute.append(trained.compute_ms)
            stats = trained.stats()
            counted += stats.get("bytes_total", 0.0)
            laps.append({key: ms for key, ms in stats.items() if key.startswith("ms_")})
            clock.append(time.perf_counter())
        trained.finish()
        dist.barrier()
        return {
            "ms": [(end - begin) * 1e3 for begin, end in zip(clock, clock[1:], strict=False)],
            "forward": statistics.fmean(forward),
            "compute": statistics.fmean(compute),
            "interface": (interface_bytes() - sent) / (lead + steps),
            "counted": counted / (lead + steps),
            "laps": {key: statistics.fmean(lap[key] for lap in laps) for key in laps[0]} if laps[0] else {},
        }

    def _step(self, name: str) -> None:
        self.methods[name].step(self.batch(self.steps[name]))
        self.steps[name] += 1

    def probe(self, request: dict[str, Any]) -> dict[str, Any]:
        """Median seconds of a bare all-reduce of each size in bytes, and of an all-gather to the largest."""
        import torch
        import torch.distributed as dist

        def median(call: Callable[[], object]) -> float:
            times = []
            for _ in range(request["repeat"]):
                dist.barrier()
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            return statistics.median(times)

        messages = [torch.zeros(nbytes // 4) for nbytes in request["sizes"]]
        own = messages[-1].chunk(self.world)[0].clone()
        whole = torch.zeros(own.numel() * self.world)
        return {
            "seconds": [median(lambda m=message: dist.all_reduce(m)) for message in messages],  # type: ignore[misc]
            "gather": median(lambda: dist.all_gather_into_tensor(whole, own)),
        }

    def train(self, request: dict[str, Any]) -> dict[str, Any]:
        """Some steps of one method at its learning rate, after a linear warm-up; returns the seconds they took."""
        import torch.distributed as dist

        name, seconds = request["method"], 0.0
        dist.barrier()
        for _ in range(request["steps"]):
            batch = self.batch(self.steps[name])  # reading text is not what is compared
            for group in self.methods[name].optimizer.param_groups:
                group["lr"] = self.lr[name] * min(1.0, (self.steps[name] + 1) / request["warmup"])
            self.steps[name] += 1
            start = time.perf_counter()
            self.methods[name].step(batch)
            seconds += time.perf_counter() - start
        start = time.perf_counter()
        self.methods[name].finish()
        return {"seconds": seconds + time.perf_counter() - start, "step": self.steps[name]}

    def evaluate(self, request: dict[str, Any]) -> dict[str, Any]:
        """This rank's mean loss over its share of the held-out text, in nats a token."""
        import torch

        from launch.batches import count_windows, eval_windows, read_windows
        from launch.models import next_token_loss

        windows = count_windows(len(self.data.val), self.seq)
        batches = eval_windows(windows, request["batches"], self.world, self.rank, self.micro_batch)
        model = self.methods[request["method"]].model
        model = getattr(model, "module", model)  # alone: engines and DDP would count the pass as a step
        with torch.no_grad():
            losses = [
                next_token_loss(model, torch.from_numpy(read_windows(self.data.val, b, self.seq))) for b in batches
            ]
        return {"loss": float(torch.stack(losses).mean())}

    def timeline(self, request: dict[str, Any]) -> dict[str, Any]:
        """Some steps of a SCAPE method with every part timed; the first asks for it, all ranks note, one may trace."""
        import torch.distributed as dist

        from evals.network.watch import StepWatch, profiler
        from launch.models import next_token_loss

        name = request["method"]
        engine = self.methods[name].engine
        watch = self.watched.get(name) or self.watched.setdefault(name, StepWatch(engine))
        trace = Path(request["trace"]) if request.get("trace") and self.rank == 0 else None
        for timed in (False, True):  # the first step leaves a mask in flight
            dist.barrier()
            if timed:
                watch.spans.clear()
                watch.gathers = watch.gathers[-1:]
            with profiler(trace if timed else None) as profile:
                for _ in range(request["steps"] if timed else 1):
                    batch = self.batch(self.steps[name])
                    self.steps[name] += 1
                    with watch.span("forward"):
                        loss = next_token_loss(engine, batch)
                    with watch.span("backward"):
                        engine.backward(loss)
                    with watch.span("step"):
                        engine.step()
        if trace is not None:
            trace.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(trace))
        self.methods[name].finish()
        dist.barrier()
        return {"spans": watch.spans, "gathers": watch.gathers}

    def drop(self, request: dict[str, Any]) -> dict[str, Any]:
        """Forget one method and give its memory back."""
        import gc

        self.methods.pop(request["method"], None)
        gc.collect()
        return {}

    def leave(self, request: dict[str, Any]) -> dict[str, Any]:
        """End together: a rank that goes first would look like a failure to the others."""
        import torch.distributed as dist

        self.methods.clear()
        dist.barrier()
        return {}


def serve(control: Connection) -> None:
    """Answer requests until told to leave; an error goes back as its traceback."""
    rank: Rank | None = None
    while True:
        request = control.recv()
        try:
            if rank is None:
                rank, reply = Rank(request), {}
            else:
                assert request["do"] in VERBS, request
                reply = getattr(rank, request["do"])(request)
            control.send(reply)
        except Exception:
            control.send({"error": traceback.format_exc()})
            os._exit(1)
        if request["do"] == "leave":
            os._exit(0)  # DeepSpeed's and gloo's own ends may wait for peers that have gone


def main() -> None:
    die_with_parent()
    serve(Connection(int(os.environ[CONTROL])))


if __name__ == "__main__":
    main()
