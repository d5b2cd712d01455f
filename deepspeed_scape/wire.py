"""Count the bytes this rank sends in collectives, whoever calls them.

Every collective of `torch.distributed` ends in a method of the bound class `ProcessGroup` (`group.allreduce(...)`), so
that is where the meter sits. The public functions are no good place: DeepSpeed's `TorchBackend` keeps references to
them from its construction on, `send` is made of `isend`, and the object collectives are made of other collectives.
At the class each call is seen once, also when the meter comes after `deepspeed.init_distributed()`.

Not seen: what never passes through Python (DDP's own reducer, functional collectives, symmetric memory), barriers and
the store (a few hundred bytes). DeepSpeed's shared-memory all-reduce is not seen either, and puts nothing on a wire.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Record:
    """One collective as this rank saw it; sizes in bytes."""

    op: str  # name in torch.distributed
    group_size: int
    group: str  # the process group's name
    tensor_bytes: int  # what `bytes_to_send` takes: see there
    bytes_sent: int
    async_op: bool | None  # None: the binding does not say


@dataclass(frozen=True)
class _Call:
    """How one `ProcessGroup` method names its tensors: position and possible keywords."""

    op: str
    position: int
    keywords: tuple[str, ...]


# torch 2.13 renamed several methods and keeps the old names as bindings of their own: both are listed.
_CALLS = {
    "allreduce": _Call("all_reduce", 0, ("tensors", "tensor")),
    "allreduce_coalesced": _Call("all_reduce", 0, ("tensors",)),
    "reduce": _Call("reduce", 0, ("tensors", "tensor")),
    "broadcast": _Call("broadcast", 0, ("tensors", "tensor")),
    "allgather": _Call("all_gather", 1, ("input_tensors", "input_tensor")),
    "all_gather_single": _Call("all_gather", 1, ("input",)),
    "_allgather_base": _Call("all_gather", 1, ("input",)),
    "allgather_coalesced": _Call("all_gather", 1, ("input_list",)),
    "all_gather_single_coalesced": _Call("all_gather", 1, ("inputs",)),
    "allgather_into_tensor_coalesced": _Call("all_gather", 1, ("inputs",)),
    "gather": _Call("gather", 1, ("input_tensors", "input_tensor")),
    "scatter": _Call("scatter", 0, ("output_tensors", "output_tensor")),
    "reduce_scatter": _Call("reduce_scatter", 1, ("input_tensors", "input")),
    "reduce_scatter_single": _Call("reduce_scatter", 1, ("inputTensor",)),
    "_reduce_scatter_base": _Call("reduce_scatter", 1, ("inputTensor",)),
    "reduce_scatter_single_coalesced": _Call("reduce_scatter", 1, ("inputs",)),
    "reduce_scatter_tensor_coalesced": _Call("reduce_scatter", 1, ("inputs",)),
    "all_to_all_single": _Call("all_to_all", 1, ("input",)),
    "alltoall_base": _Call("all_to_all", 1, ("input",)),
    "alltoall": _Call("all_to_all", 1, ("input_tensors",)),
    "send": _Call("send", 0, ("tensors",)),
}


def bytes_to_send(op: str, tensor_bytes: int, group_size: int, rank: int, root: int, backend: str) -> int:
    """Bytes that `rank` of a group of `n = group_size` sends; b is `tensor_bytes`; rank and root count in the group.

    ================  ===========================  ============================  ===================================
    op                b                            nccl, rccl (and any other)    gloo
    ================  ===========================  ============================  ===================================
    all_reduce        the tensor                   2 (n-1)/n b                   the same (ring)
    reduce_scatter    the whole input              (n-1)/n b                     2 (n-1)/n b: an all-reduce inside
    all_gather        this rank's input            (n-1) b                       the same (ring)
    all_to_all        the input for other ranks    b                             the same
    reduce            the tensor                   (n-1)/n b                     b; the root (n-1)/n b
    broadcast         the tensor                   (n-1)/n b                     children of the rank times b
    gather            this rank's input            b; the root 0                 the same
    scatter           this rank's output           the root (n-1) b; others 0    the same
    send              the tensor                   b                             the same
    ================  ===========================  ============================  ===================================

    The nccl column takes the ring, which NCCL picks for large messages. Its broadcast and reduce are chains in which
    n-1 of the ranks send b; which one does not depends on the topology, so the mean is given to each. Gloo's broadcast
    is a binomial tree from the root (gloo/broadcast.cc), its reduce a ring reduce-scatter and then a gather
    (gloo/reduce.cc). Ring figures are exact where n divides the tensor; gloo cuts whole elements, so for a tensor of
    few elements single ranks are off by a chunk, while the sum over ranks still holds. Protocol headers are left out.
    Raises ValueError for an op not in the table.
    """
    n, b, gloo = group_size, tensor_bytes, backend == "gloo"
    if n == 1:
        return 0
    if op == "all_reduce" or (op == "reduce_scatter" and gloo):
        return _share(2 * (n - 1) * b, n)
    if op in ("reduce", "broadcast", "reduce_scatter"):
        if op == "broadcast" and gloo:
            return _tree_children(n, (rank - root) % n) * b
        if op == "reduce" and gloo and rank != root:
            return b
        return _share((n - 1) * b, n)
    if op == "all_gather":
        return (n - 1) * b
    if op == "gather":
        return 0 if rank == root else b
    if op == "scatter":
        return (n - 1) * b if rank == root else 0
    if op in ("all_to_all", "send"):
        return b
    raise ValueError(f"op={op!r} is not one of {sorted({call.op for call in _CALLS.values()})}")


def _share(total: int, n: int) -> int:
    """total / n, to the nearest byte."""
    return (2 * total + n) // (2 * n)


def _tree_children(n: int, virtual_rank: int) -> int:
    """How many ranks get the tensor from this one in gloo's binomial tree; the root is virtual rank 0."""
    children, bit = 0, 1
    while bit < n:  # in the round of `bit`, the first `bit` ranks have it and pass it `bit` ranks on
        if virtual_rank < bit and virtual_rank + bit < n:
            children += 1
        bit *= 2
    return children


class WireMeter:
    """Bytes this rank sends from `install()` to `remove()`, as a context manager or by hand.

    `bytes_sent` is the sum in bytes, `bytes_by_op` the same by operation, `calls` the number of collectives.
    `records` holds the last `max_records` of them when `keep_records` is set. Works across threads (backward hooks
    run in autograd's), and several meters may be installed at once; each counts for itself.
    """

    def __init__(self, keep_records: bool = False, max_records: int = 100_000) -> None:
        self._lock = threading.Lock()
        self._keep_records = keep_records
        self._records: deque[Record] = deque(maxlen=max_records)
        self.reset()

    @property
    def records(self) -> list[Record]:
        """The collectives seen, oldest first; empty without `keep_records`."""
        with self._lock:
            return list(self._records)

    def reset(self) -> None:
        """Start again from zero; the meter stays where it is."""
        with self._lock:
            self.bytes_sent = 0
            self.calls = 0
            self.bytes_by_op: Counter[str] = Counter()
            self._records.clear()

    def install(self) -> "WireMeter":
        """Start counting; a second call changes nothing."""
        with _patch_lock:
            if self not in _meters:
                _meters.append(self)
                if len(_meters) == 1:
                    _patch()
        return self

    def remove(self) -> None:
        """Stop counting; the last meter to go puts the original methods back."""
        with _patch_lock:
            if self in _meters:
                _meters.remove(self)
                if not _meters:
                    _unpatch()

    def __enter__(self) -> "WireMeter":
        return self.install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def _add(self, record: Record) -> None:
        with self._lock:
            self.bytes_sent += record.bytes_sent
            self.calls += 1
            self.bytes_by_op[record.op] += record.bytes_sent
            if self._keep_records:
                self._records.append(record)


_meters: list[WireMeter] = []
_originals: dict[str, Any] = {}
_patch_lock = threading.Lock()


def _patch() -> None:
    for method, call in _CALLS.items():
        original = vars(dist.ProcessGroup).get(method)
        if original is not None:  # the names differ between torch versions
            _originals[method] = original
            setattr(dist.ProcessGroup, method, _counted(getattr(dist.ProcessGroup, method), call))


def _unpatch() -> None:
    for method, original in _originals.items():
        setattr(dist.ProcessGroup, method, original)
    _originals.clear()


def _counted(method: Callable[..., Any], call: _Call) -> Callable[..., Any]:
    """`method`, reporting each call that did not raise to the installed meters."""

    def counted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        work = method(group, *args, **kwargs)
        record = _record(group, call, args, kwargs)
        for meter in tuple(_meters):
            meter._add(record)
        return work

    return counted


def _record(group: dist.ProcessGroup, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
    n, rank = group.size(), group.rank()
    given = list(args) + list(kwargs.values())
    tensors = args[call.position] if len(args) > call.position else _keyword(call, kwargs)
    options = next((value for value in given if hasattr(value, "timeout")), None)  # the op's options object
    root = getattr(options, "rootRank", None)
    if root is None and call.op in ("broadcast", "reduce", "gather", "scatter"):  # the short overloads
        root = kwargs["root"] if "root" in kwargs else next(value for value in args if isinstance(value, int))
    tensor_bytes = _nbytes(tensors)
    if call.op == "all_to_all":
        tensor_bytes -= _own_bytes(tensors, args, kwargs, n, rank)
    sent = bytes_to_send(call.op, tensor_bytes, n, rank, root or 0, _backend(group, tensors))
    return Record(call.op, n, group.group_name, tensor_bytes, sent, getattr(options, "asyncOp", None))


def _keyword(call: _Call, kwargs: dict[str, Any]) -> Any:
    return next(kwargs[name] for name in call.keywords if name in kwargs)


def _nbytes(tensors: Any) -> int:
    """Bytes of a tensor, or of a list (of lists) of them."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_nbytes(tensor) for tensor in tensors)


def _own_bytes(tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any], n: int, rank: int) -> int:
    """The part of an all-to-all's input that stays on this rank, in bytes."""
    if not isinstance(tensors, Tensor):
        return _nbytes(tensors[rank])
    splits: Sequence[int] = args[3] if len(args) > 3 else kwargs.get("input_split_sizes", ())
    rows = splits[rank] if splits else tensors.shape[0] // n
    return rows * _nbytes(tensors) // max(1, tensors.shape[0])


def _backend(group: dist.ProcessGroup, tensors: Any) -> str:
    """Name of the backend that carries tensors of this device: one group may have gloo and nccl."""
    while not isinstance(tensors, Tensor):
        if len(tensors) == 0:
            return ""
        tensors = tensors[0]
    return group._get_backend(torch.device(tensors.device.type)).name()
