"""The GPU check of the residual in host memory, tried out on a CPU: it runs, and it notices a difference."""

from __future__ import annotations

import sys

import pytest

from deepspeed_scape import host_residual
from evals import gpu_residual

TRIAL = ["gpu_residual", "--device", "cpu", "--elements", "20000", "--ranks", "3", "--bucket", "700"]


@pytest.fixture(autouse=True)
def trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", TRIAL)
    monkeypatch.setattr(host_residual, "BUCKET", 1)  # the script sets it; put back afterwards


def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_residual.main()
    assert "equal to the bit over 6 steps" in capsys.readouterr().out


def test_it_notices_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_residual.Waiting, "prepare", lambda *_: lambda values: None)
    with pytest.raises(SystemExit, match="step 0: .* values to send differ"):
        gpu_residual.main()
