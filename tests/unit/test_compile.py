"""Every kernel compiled for GPUs that are not here: no register spills, wide loads, no fused arithmetic in a score."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="no Triton on this platform")

ROOT = Path(__file__).parents[2]
TARGETS = ("cuda:80", "cuda:90", "hip:gfx942")

# loads of 16 bytes that a thread makes at least, in passes over contiguous memory: all arrays of 4-byte elements, and
# 2-byte gradients where a program's share is large enough
WIDE = {
    "accumulate._stream[g-bf16]": 3,
    "accumulate._stream[g-bf16-squares]": 1,
    "accumulate._stream[g-bf16-squares-both]": 3,
    "accumulate._stream[g-fp32]": 4,
    "accumulate._stream[g-fp32-squares]": 2,
    "update._update[ema-dense]": 5,
    "update._update[adams-dense]": 4,
    "top_k._collect[r-fp32]": 6,
    "top_k._collect[r-bf16]": 5,
    "block_top_k._block_top_k[r-fp32-B200]": 3,
    "block_top_k._block_top_k[r-fp32-B1000]": 3,
    "block_top_k._block_top_k[r-fp32-B4000]": 6,
    "mask_code._write_delta[delta]": 2,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What came out, by kernel and target."""
    cache = tmp_path_factory.mktemp("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    lines: list[str] = []
    running = [_compile(target, environment, cache) for target in TARGETS]  # side by side: one takes half a minute
    try:
        for process, out, said in running:
            assert process.wait(500) == 0, said.read_text()[-3000:]
            lines += out.read_text().splitlines()
    finally:
        for process, *_ in running:
            process.kill()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
    if old and all("ROCm linker" in row.get("error", "") for row in rows if row["target"].startswith("hip")):
        rows = [row for row in rows if not row["target"].startswith("hip")]
    return {(row["kernel"], row["target"]): row for row in rows}


def _compile(target: str, environment: dict[str, str], folder: Path) -> tuple[subprocess.Popen[bytes], Path, Path]:
    out, said = (folder / f"{target.replace(':', '-')}.{kind}" for kind in ("out", "err"))
    command = [sys.executable, "-m", "tests.compile_kernels", target]
    with out.open("wb") as stdout, said.open("wb") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stdout, stderr=stderr)
    return process, out, said


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, compiled: dict[tuple[str, str], dict[str, Any]]) -> str:
    its: str = request.param
    if not any(key[1] == its for key in compiled):
        pytest.skip(f"Triton {triton.__version__} links for {its} with the ld.lld of a ROCm, which is not here")
    return its


def test_everything_compiles_without_spills(compiled: dict[tuple[str, str], dict[str, Any]], target: str) -> None:
    rows = {kernel: row for (kernel, its), row in compiled.items() if its == target}
    wrong = {kernel: row for kernel, row in rows.items() if "error" in row or row["spills"]}
    assert len(rows) >= 40 and not wrong, wrong
    assert {kernel.split("._")[0] for kernel in rows} == {
        "accumulate", "block_top_k", "mask_code", "pack", "scatter", "top_k", "update"
    }  # fmt: skip


def test_contiguous_passes_load_16_bytes_at_a_time(
    compiled: dict[tuple[str, str], dict[str, Any]], target: str
) -> None:
    got = {kernel: compiled[kernel, target]["wide_loads"] for kernel in WIDE}
    assert {kernel: n for kernel, n in got.items() if n < WIDE[kernel]} == {}


def test_a_score_is_two_products_and_a_sum(compiled: dict[tuple[str, str], dict[str, Any]], target: str) -> None:
    """One fused multiply-add and the mask would be another than the CPU's."""
    scores = ("top_k._collect", "top_k._sample", "block_top_k.")
    rows = {kernel: row for (kernel, its), row in compiled.items() if its == target and kernel.startswith(scores)}
    assert len(rows) >= 12 and not {kernel: row["fused"] for kernel, row in rows.items() if row["fused"]}
