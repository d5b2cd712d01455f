"""Run a training script with SCAPE registered, without touching the script.

deepspeed --module deepspeed_scape.run train.py --deepspeed_config ds.json
python -m deepspeed_scape.run --doctor --deepspeed_config ds.json      # what would it do here? (doctor.py)
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import NoReturn

import deepspeed_scape
from deepspeed_scape.manifest import ScapeCheckpointError

USAGE = """usage: deepspeed [launcher options] --module deepspeed_scape.run SCRIPT [script options]
       python -m deepspeed_scape.run --doctor [--deepspeed_config JSON [--params N] [--ranks N]]"""
HELP = f"""{USAGE}

Runs a training script, unchanged, whose DeepSpeed JSON may ask for "SCAPE" or "AdamS":

    deepspeed --num_gpus 2 --module deepspeed_scape.run train.py --deepspeed_config ds.json

The doctor starts nothing. It tells what this machine can do and what a JSON would do; --doctor --help tells more:

    python -m deepspeed_scape.run --doctor --deepspeed_config ds.json --params 1.8e9 --ranks 32"""


def split_arguments(arguments: list[str]) -> tuple[str, list[str]]:
    """The script and what it gets. The launcher puts ``--local_rank=N`` first; the script gets it behind its name.

    Raises:
        SystemExit: there is no script, or something else stands where it should.
    """
    ours = [argument.startswith("--local_rank") for argument in arguments]
    at = ours.index(False) if False in ours else len(arguments)
    if at == len(arguments):
        _wrong("no script given")
    script = arguments[at]
    if script.startswith("-"):
        _wrong(f"{script} stands where the script should")
    if not os.path.isfile(script):
        _wrong(f"script {script}: there is no such file in {os.getcwd()}")
    if script.endswith((".json", ".hjson")):  # which Python would read, as an expression
        _wrong(f"{script} is no Python script")
    return script, arguments[:at] + arguments[at + 1 :]


def _wrong(what: str) -> NoReturn:
    print(f"deepspeed_scape.run: {what}\n{USAGE}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Run the script as ``__main__``, with its own folder first on the path, as python itself would.

    A configuration or checkpoint that is refused is told without the way through DeepSpeed's code, which every rank
    would print.
    """
    deepspeed_scape.register()
    if sys.argv[1:2] in (["--help"], ["-h"]):
        print(HELP)
        sys.exit(0)
    if sys.argv[1:2] == ["--doctor"]:
        from deepspeed_scape import doctor

        sys.exit(doctor.main(sys.argv[2:]))
    script, arguments = split_arguments(sys.argv[1:])
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except (deepspeed_scape.ScapeConfigError, ScapeCheckpointError) as error:
        if error.__cause__ is not None:  # an error of somebody else's, of which we may have made the wrong sense
            raise
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
