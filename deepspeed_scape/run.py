"""Run a training script with SCAPE registered, without touching the script.

deepspeed --module deepspeed_scape.run train.py --deepspeed_config ds.json
python -m deepspeed_scape.run --doctor --deepspeed_config ds.json      # what would it do here? (doctor.py)
"""

from __future__ import annotations

import runpy
import sys

import deepspeed_scape

USAGE = """usage: deepspeed [launcher options] --module deepspeed_scape.run SCRIPT [script options]
       python -m deepspeed_scape.run --doctor [--deepspeed_config JSON] [--params N] [--ranks N]"""


def split_arguments(arguments: list[str]) -> tuple[str, list[str]]:
    """The script and what it gets. The launcher puts ``--local_rank=N`` first; the script gets it behind its name.

    Raises:
        SystemExit: there is no script.
    """
    script = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), None)
    if script is None:
        raise SystemExit(f"deepspeed_scape.run: no script given\n{USAGE}")
    return arguments[script], arguments[:script] + arguments[script + 1 :]


def main() -> None:
    """Run the script as ``__main__``, with its own folder first on the path, as python itself would.

    A configuration that is refused is told without the way through DeepSpeed's code, which every rank would print.
    """
    deepspeed_scape.register()
    if sys.argv[1:2] == ["--doctor"]:
        from deepspeed_scape import doctor

        sys.exit(doctor.main(sys.argv[2:]))
    script, arguments = split_arguments(sys.argv[1:])
    sys.argv = [script, *arguments]
    sys.path[0] = str(_folder(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except deepspeed_scape.ScapeConfigError as error:
        if error.__cause__ is not None:  # an error of DeepSpeed's, of which we may have made the wrong sense
            raise
        sys.exit(f"ScapeConfigError: {error}")


def _folder(script: str) -> str:
    import os

    return os.path.dirname(os.path.abspath(script))


if __name__ == "__main__":
    main()
