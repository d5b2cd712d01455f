"""The Triton form: the launchers of every kernel under the names of :class:`deepspeed_scape.kernels.Ops`."""

from deepspeed_scape.kernels.accumulate import accumulate, prepare_accumulate, sum_squares
from deepspeed_scape.kernels.block_top_k import block_top_k
from deepspeed_scape.kernels.mask_code import decode_masks, encode_masks
from deepspeed_scape.kernels.pack import pack, pack_bucket
from deepspeed_scape.kernels.scatter import scatter_params
from deepspeed_scape.kernels.top_k import top_k
from deepspeed_scape.kernels.top_rows import largest_of_rows
from deepspeed_scape.kernels.update import update

__all__ = [
    "accumulate",
    "block_top_k",
    "decode_masks",
    "encode_masks",
    "largest_of_rows",
    "pack",
    "pack_bucket",
    "prepare_accumulate",
    "scatter_params",
    "sum_squares",
    "top_k",
    "update",
]
