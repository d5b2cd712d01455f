"""Compile every kernel as its launcher would launch it, for GPUs that are not there, and tell what came out.

    python -m tests.compile_kernels cuda:80 cuda:90 hip:gfx942     one JSON line a kernel and target

Runs in a process of its own, without Triton's interpreter. The launchers are called with CPU tensors; in place of every
launch its arguments are noted, with the types and alignments that Triton itself would read off them.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from deepspeed_scape.adams import Hyper
from deepspeed_scape.config import ScapeOptions
from deepspeed_scape.decay import DecayHistory
from deepspeed_scape.encoding import MaskCode, choose_code, delta_nbytes
from deepspeed_scape.kernels import accumulate, gpu
from deepspeed_scape.layout import GroupLayout, kept_in_partition
from deepspeed_scape.mask import Moments

_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.uint8: "u8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
SIZE = 1 << 18  # S, with a multiple of 16 in every size, as in a real model


class Launches:
    """Notes (label, kernel, arguments) of every launch."""

    def __init__(self) -> None:
        self.label = ""
        self.seen: dict[str, tuple[JITFunction, dict[str, Any]]] = {}

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        arguments = dict(zip([p.name for p in kernel.params], args, strict=False)) | kwargs
        key = f"{kernel.fn.__module__.rsplit('.', 1)[1]}.{kernel.fn.__name__}[{self.label}]"
        key += "-again" if arguments.get("AGAIN") else ""
        key += f"-{arguments['LEVEL']}" if arguments.get("LEVEL") else ""
        self.seen.setdefault(key, (kernel, arguments))


def source(kernel: JITFunction, arguments: dict[str, Any]) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton would compile for these arguments, and the launch options among them."""
    signature, constants, attributes = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = arguments[param.name]
        if param.is_constexpr:
            signature[param.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = "*" + _TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        elif value == 1 and not param.do_not_specialize:
            signature[param.name], constants[(i,)] = "constexpr", 1
        else:
            signature[param.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    names = {param.name for param in kernel.params}
    options = {name: value for name, value in arguments.items() if name not in names}
    if "constexprs" in inspect.signature(ASTSource).parameters:
        return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes), options
    return older_source(kernel, signature, constants, attributes), options


def older_source(kernel: JITFunction, signature: dict[str, str], constants: Any, attributes: Any) -> ASTSource:
    """The same as Triton 3.2 wants it: constants by name, and a specialised 1 in both places."""
    from triton.backends.compiler import AttrsDescriptor

    hints = {i: 16 for (i,) in attributes} | {i: 1 for (i,) in constants if not kernel.params[i].is_constexpr}
    types = {
        param.name: "i32" if hints.get(i) == 1 else signature[param.name]
        for i, param in enumerate(kernel.params) if not param.is_constexpr
    }  # fmt: skip
    named = {kernel.params[i].name: value for (i,), value in constants.items()}
    return ASTSource(kernel, types, named, AttrsDescriptor.from_hints(hints))


def launch_everything(launches: Launches) -> None:
    """Call each launcher in the forms that a step uses."""
    residual = torch.zeros(2 * SIZE)
    for dtype in (torch.bfloat16, torch.float32):
        launches.label = f"g-{_TYPES[dtype]}"
        grads = [torch.zeros(SIZE, dtype=dtype)]
        gpu.accumulate(residual, grads, [0], 0.5)
        launches.label += "-squares"
        gpu.sum_squares(grads)
        launches.label += "-both"
        accumulate.accumulate_and_measure(residual, grads, [0], 0.5)
    launches.label = "odd"
    gpu.accumulate(residual, [torch.zeros(1001)], [3], 0.5)
    kept = SIZE // 128
    position = torch.arange(2 * kept)
    launches.label = "sparse"
    values = torch.zeros(2, kept)
    gpu.pack(residual, position, values)
    gpu.scatter_params(residual.bfloat16(), position, values.bfloat16())
    gpu.pack_bucket(residual[:SIZE], SIZE, position[kept:], torch.zeros(kept))
    launch_updates(launches, position[:kept])
    for dtype in (torch.float32, torch.bfloat16):
        launches.label = f"r-{_TYPES[dtype]}"
        some = Moments(
            gradient=torch.zeros(SIZE, dtype=dtype),
            exp_avg=torch.zeros(SIZE),
            last=torch.zeros(SIZE, dtype=torch.int32),
        )
        gpu.top_k(some, 90, 0.9, kept, 0)
        for block_size in (200, 300, 1000, 4000):
            launches.label = f"r-{_TYPES[dtype]}-B{block_size}"
            options = ScapeOptions(selection="block", block_size=block_size, sparsity=0.99)
            layout = GroupLayout(world_size=1, partition_size=SIZE, kept=kept_in_partition(SIZE, options), slots=())
            code = choose_code(layout, options)
            gpu.block_top_k(some, 90, 0.9, code, torch.zeros(code.nbytes, dtype=torch.uint8))
    launch_codes(launches, position[:kept])


def launch_updates(launches: Launches, own: torch.Tensor) -> None:
    states = tuple(torch.zeros(SIZE) for _ in range(3))
    decay = DecayHistory(torch.device("cpu"))
    decay.record(1, 1e-2, 0.1)
    for normalizer in ("ema", "adams"):
        for label, index in (("sparse", own), ("dense", None)):
            launches.label = f"{normalizer}-{label}"
            mean = torch.zeros(SIZE if index is None else index.numel())
            hyper = Hyper(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, normalizer=normalizer)
            last = torch.zeros(SIZE, dtype=torch.int32)
            gpu.update(index, mean, 1, states, last, decay, hyper, mean.bfloat16())  # type: ignore[arg-type]


def launch_codes(launches: Launches, index: torch.Tensor) -> None:
    kept = index.numel()
    for code in (
        MaskCode(kind="delta", size=SIZE, kept=kept, nbytes=delta_nbytes(SIZE, kept)),
        MaskCode(kind="bitmap", size=SIZE, kept=kept, nbytes=SIZE // 8),
        MaskCode(kind="offset", size=SIZE, kept=kept, nbytes=kept, block_size=256, block_kept=2),
    ):
        launches.label = code.kind
        encoded = torch.zeros(2, code.nbytes, dtype=torch.uint8)
        gpu.encode_masks(index.view(1, -1), code, encoded[:1])
        gpu.decode_masks(encoded, code, torch.zeros(1, dtype=torch.int32))


def describe(compiled: Any, backend: str) -> dict[str, Any]:
    """Registers, spills, loads from global memory (of 16 bytes, and all) and fused multiply-adds of a kernel."""
    if backend == "hip":
        text = compiled.asm["amdgcn"]
        spills = sum(int(n) for n in re.findall(r"\.[vs]gpr_spill_count:\s*(\d+)", text))
        widths = {"dword ": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
        loads = [widths[kind] for kind in widths for _ in re.findall(rf"(?:global|buffer)_load_{kind}", text)]
        fused = len(re.findall(r"v_(?:pk_)?fma(?:c|mk|ak)?_f32|v_mac_f32", text))
        registers = max(int(n) for n in re.findall(r"\.vgpr_count:\s*(\d+)", text))
        return {
            "registers": registers,
            "spills": spills,
            "wide_loads": loads.count(16),
            "loads": len(loads),
            "fused": fused,
        }
    usage = resource_usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    loads = [
        int(count or 1) * int(bits) // 8
        for count, bits in re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)", ptx)
    ]
    return usage | {"wide_loads": loads.count(16), "loads": len(loads), "fused": len(re.findall(r"fma\.rn\.f32", ptx))}


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of local memory, which is where spills go, by the ``cuobjdump`` that Triton carries."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        out = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack, local = (int(re.search(rf"{key}:(\d+)", out.stdout)[1]) for key in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    return {"registers": registers, "spills": stack + local}


def main() -> None:
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        sys.exit("TRITON_INTERPRET is set: the interpreter compiles nothing")
    launches = Launches()
    JITFunction.run = lambda kernel, *args, **kwargs: launches.run(kernel, *args, **kwargs)
    launch_everything(launches)
    for name in sys.argv[1:]:
        backend, arch = name.split(":")
        target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, 64 if backend == "hip" else 32)
        for key, (kernel, arguments) in launches.seen.items():
            what, options = source(kernel, arguments)
            try:
                result = describe(triton.compile(what, target=target, options=options), backend)
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"[-2000:]}
            print(json.dumps({"kernel": key, "target": name, **result}), flush=True)


if __name__ == "__main__":
    main()
