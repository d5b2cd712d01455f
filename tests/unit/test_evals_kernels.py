"""The kernel table's script on a CPU: every kernel runs in both forms, and the targets are judged from the rows."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

from evals import kernels


def test_the_table_has_a_row_for_every_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "kernels.csv"
    arguments = ["--device", "cpu", "--elements", "20000", "--seconds", "0.001", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["kernels", *arguments])
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda _: 10e9)
    threads = torch.get_num_threads()
    kernels.main()
    torch.set_num_threads(threads)
    rows = list(csv.DictReader(output.open()))
    each = [
        "sum_squares",
        "accumulate",
        "accumulate_and_measure",
        "pack",
        "update",
        "scatter",
        "top_k",
        "block_top_k",
        "encode",
        "decode",
    ]
    assert [row["kernel"] for row in rows] == [*each, *each, "update_dense"]
    for row in rows:
        assert float(row["ms"]) > 0 and float(row["torch_ms"]) > 0 and int(row["bytes"]) > 0 and row["commit"]
        share = int(row["bytes"]) / float(row["ms"]) / 10e6
        assert float(row["copy_share"]) == pytest.approx(share, rel=0.02, abs=2e-3)
    assert capsys.readouterr().out.count("(target 1.3)") == 2


def test_the_verdicts_name_what_misses_a_target() -> None:
    row = {"elements": 10, "sparsity": 0.9, "bytes": 120, "copy_gb_s": 1e-3, "copy_share": 1.0}  # 1 byte a microsecond
    rows = [{**row, "kernel": name, "ms": 0.12} for name in kernels.COUNTED]
    rows[0]["copy_share"] = 0.5
    said = kernels.verdicts(rows, torch.device("cpu"))
    assert "1.00 x floors" in said[0] and "1.00 reads of S" in said[1] and said[2].endswith("copy: accumulate")
