"""The tests on the oldest and the newest DeepSpeed and on two versions of torch.

    python -m evals.compatibility                                  # every pair; about half an hour each on 2 cores
    python -m evals.compatibility --pairs 0.16.9/2.13.0 -- tests/unit
    python -m evals.compatibility --failed                         # once more what failed, with nothing beside it
    python -m evals.readme                                         # the README's table

Each pair (DeepSpeed/torch) gets a virtual environment of its own under runs/compatibility/ and runs launch/test.sh, the
command of CI. Torch before 2.13 comes from PyPI with CUDA, 5 GB on the disk; --remove deletes an environment after its
run. evals/results/compatibility.json keeps the newest result of each pair; what failed in it and passed with --failed
stays there under both names.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from evals.files import write
from evals.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "evals" / "results" / "compatibility.json"
PAIRS = ("0.16.9/2.13.0", "0.19.8/2.13.0", "0.16.9/2.6.0", "0.19.8/2.6.0")


def run_tests(pair: str, folder: Path, arguments: list[str]) -> dict[str, Any]:
    """launch/test.sh in the pair's own environment: how many passed, and the names of those that failed."""
    deepspeed, torch = pair.split("/")
    folder.mkdir(parents=True, exist_ok=True)
    junit = folder / "junit.xml"
    junit.unlink(missing_ok=True)
    env = {
        **os.environ,
        "VENV": str(folder / "venv"),
        "DEEPSPEED_SPEC": f"deepspeed=={deepspeed}",
        "TORCH_SPEC": f"torch=={torch}",
    }
    begin = time.monotonic()
    with open(folder / "log", "wb") as log:
        command = ["bash", "launch/test.sh", f"--junitxml={junit}", *arguments]
        subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    if not junit.exists():
        raise RuntimeError(f"{pair}: no test ran; see {folder / 'log'}")
    return {**read_junit(junit), "minutes": round((time.monotonic() - begin) / 60, 1)}


def run_failed(known: dict[str, dict[str, Any]], pair: str, folder: Path) -> dict[str, Any]:
    """The recorded result of a pair with ``passed_again``: which of its failures pass now."""
    failed = known[pair]["failed"]
    again = run_tests(pair, folder, [node_id(name) for name in failed])
    print(json.dumps({"pair": pair, "again": again}), flush=True)
    return {**known[pair], "passed_again": sorted(set(failed) - set(again["failed"])), "again": provenance()}


def node_id(name: str) -> str:
    """pytest's name of a test that a report calls ``package.module::test[parameter]``."""
    module, _, test = name.partition("::")
    return f"{module.replace('.', '/')}.py::{test}"


def read_junit(path: Path) -> dict[str, Any]:
    """Counts of a pytest report, and what failed."""
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases
              if case.find("failure") is not None or case.find("error") is not None]  # fmt: skip
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


def versions(venv: Path) -> dict[str, str]:
    """What the environment really holds."""
    code = (
        "import importlib.metadata as m, json, platform; print(json.dumps({'python': platform.python_version(), "
        "**{n: m.version(n) for n in ('deepspeed', 'torch', 'triton', 'numpy', 'pydantic', 'transformers')}}))"
    )
    done = subprocess.run([str(venv / "bin" / "python"), "-c", code], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evals.compatibility", description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), metavar="DEEPSPEED/TORCH")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "compatibility")
    parser.add_argument("--failed", action="store_true", help="run only what the recorded results name as failed")
    parser.add_argument("--remove", action="store_true", help="delete each environment after its run")
    parser.add_argument("pytest", nargs="*", metavar="-- ARGUMENT", help="for pytest; a part is not recorded")
    args = parser.parse_args()
    bad = [pair for pair in args.pairs if pair.count("/") != 1]
    if bad:
        parser.error(f"--pairs {bad[0]}: give DEEPSPEED/TORCH, such as {PAIRS[0]}")
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if args.failed:
        args.pairs = [pair for pair in args.pairs if known.get(pair, {}).get("failed")]
    failed = False
    for pair in args.pairs:
        folder = args.folder / pair.replace("/", "-")
        if args.failed:
            result = run_failed(known, pair, folder)
        else:
            result = {**run_tests(pair, folder, args.pytest), **versions(folder / "venv"), "run": provenance()}
            print(json.dumps({"pair": pair, **result}), flush=True)
        failed |= set(result["failed"]) > set(result.get("passed_again", []))
        if not args.pytest:
            known[pair] = result
            write(RESULT, json.dumps(known, indent=1, sort_keys=True) + "\n")
        if args.remove:
            shutil.rmtree(folder / "venv")
    if failed:
        sys.exit("evals.compatibility: not every test passed")


if __name__ == "__main__":
    main()
