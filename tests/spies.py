"""Watch the torch operations of a step: which of them would wait for a GPU, and how much memory they take."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# the host cannot go on before it knows the value, or the size of the result
_WAITING = {
    "_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "nonzero_numpy", "unique_dim",
    "_unique2", "unique_consecutive", "bincount", "histc", "argwhere",
}  # fmt: skip


class SyncSpy(TorchDispatchMode):
    """Counts what would wait for the device if the tensors were on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.seen = 0
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused:
            self.seen += 1
            name = func._schema.name.split("::")[1]
            masks = [t for t in tree_leaves(args[1:]) if isinstance(t, torch.Tensor) and t.dtype == torch.bool]
            if name in _WAITING or (name in ("index", "index_put", "index_put_", "_index_put_impl_") and masks):
                self.found[name] += 1
            if name == "repeat_interleave" and kwargs and kwargs.get("output_size") is None:
                self.found[name] += 1
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def watching(self) -> Iterator[SyncSpy]:
        """Also count ``tolist`` and ``numpy``, which reach into CPU memory without an operation."""
        stock = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy")}

        def counted(name: str) -> Any:
            def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                if not self.paused:
                    self.found[name] += 1
                return stock[name](tensor, *args, **kwargs)

            return method

        for name in stock:
            setattr(torch.Tensor, name, counted(name))
        try:
            with self:
                yield self
        finally:
            for name, method in stock.items():
                setattr(torch.Tensor, name, method)


class MemorySpy(TorchDispatchMode):
    """Notes every operation that makes a tensor of at least ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in before:
                nbytes = tensor.untyped_storage().nbytes()
                if nbytes >= self.limit:
                    self.found.append((func._schema.name, nbytes))
        return result
