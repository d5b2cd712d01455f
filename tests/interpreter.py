"""Mend what Triton's interpreter does otherwise than every GPU.

It cuts fp32 off to bf16 instead of rounding it; before 3.9 it takes a scalar for no loop bound with a new numpy; and
that of 3.2 keeps numpy's int64 for a sum of int32, of which a store then writes 8 bytes where there is room for 4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def mend() -> None:
    """Round fp32 to bf16 to nearest even, as `cvt.rn.bf16.f32` and torch do."""
    import triton.language as tl
    from triton.runtime import interpreter

    stock = interpreter._convert_float
    if stock.__name__ == "convert":
        return

    def convert(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source == tl.float32 and target == tl.bfloat16:
            single = np.ascontiguousarray(values).view(np.float32)
            return torch.from_numpy(single.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
        if source == tl.bfloat16 and target == tl.float32:
            return np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << 16
        return stock(values, source, target, rounding)

    interpreter._convert_float = convert
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(np.ravel(self.handle.data)[0])

    interpreter._patch_lang_tensor = patch_tensor
    base = interpreter.ReduceOps.__mro__[1]  # 3.2 spells its name otherwise
    to_tensor = base.to_tensor

    def to_typed_tensor(self: Any, values: Any, dtype: Any) -> Any:
        typed = values.astype(interpreter._get_np_dtype(dtype)) if getattr(values, "shape", ()) else values
        return to_tensor(self, typed, dtype)

    base.to_tensor = to_typed_tensor
