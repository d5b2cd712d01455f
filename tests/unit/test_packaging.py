"""The wheel and the source distribution: what is in them, what they say of themselves, that the wheel works alone."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import deepspeed_scape

ROOT = Path(__file__).resolve().parents[2]
BUILD = "from setuptools import build_meta as b; import sys; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both distributions, from a copy of what git knows: a build writes into its source tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, names):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    made = {}
    for kind in ("wheel", "sdist"):
        made[kind] = out / run(sys.executable, "-c", BUILD, kind, str(out), cwd=source).splitlines()[-1]
    return made


def test_the_wheel_holds_the_package_and_nothing_else(built: dict[str, Path]) -> None:
    names = zipfile.ZipFile(built["wheel"]).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"deepspeed_scape", f"deepspeed_scape-{deepspeed_scape.__version__}.dist-info"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "deepspeed_scape").rglob("*.py")}
    assert sources <= set(names) and "deepspeed_scape/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_metadata(built: dict[str, Path]) -> None:
    wheel = zipfile.ZipFile(built["wheel"])
    (name,) = (n for n in wheel.namelist() if n.endswith("METADATA"))
    told = email.message_from_bytes(wheel.read(name))
    assert told["Name"] == "deepspeed-scape" and told["Version"] == deepspeed_scape.__version__
    assert told["License-Expression"] == "Apache-2.0" and told["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in told.get_all("Classifier", [])
    extras = set(told.get_all("Provides-Extra", []))
    assert {"train", "eval", "plot", "cpu", "wandb", "mpi", "test"} <= extras
    needs = [need for need in told.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert {need.split(">")[0].split("<")[0].split(";")[0].strip() for need in needs} == {
        "deepspeed", "torch", "triton", "numpy", "pydantic", "psutil", "rich",
    }  # fmt: skip
    assert told["Description-Content-Type"] == "text/markdown" and "# deepspeed_scape" in told.get_payload()


def test_the_source_distribution_builds_the_same_wheel(built: dict[str, Path], tmp_path: Path) -> None:
    with tarfile.open(built["sdist"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    run(sys.executable, "-c", BUILD, "wheel", str(tmp_path), cwd=source)
    (again,) = tmp_path.glob("*.whl")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(built["wheel"]).namelist())


def test_the_wheel_works_away_from_the_repository(built: dict[str, Path], tmp_path: Path) -> None:
    place = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(place),
        str(built["wheel"]), cwd=tmp_path)  # fmt: skip
    code = (
        "import deepspeed_scape, deepspeed, torch; import deepspeed_scape.doctor; print(deepspeed_scape.__file__); "
        "print(torch.optim.SCAPE.__name__)"
    )
    said = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(place)).splitlines()
    assert said[-2:] == [str(place / "deepspeed_scape" / "__init__.py"), "Scape"]
