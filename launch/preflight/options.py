"""The command line of the launch scripts: their own options, then a script or `--module` and its arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

LAUNCHERS = {
    "one-node": ("one_node.sh", "all ranks on this machine"),
    "pdsh": ("pdsh.sh", "the nodes of a hostfile, over ssh with pdsh; start it on the first of them"),
    "openmpi": ("openmpi.sh", "the nodes of a hostfile, with Open MPI's mpirun"),
    "mpich": ("mpich.sh", "the nodes of a hostfile, with MPICH's mpirun"),
    "no-ssh": ("no_ssh.sh", "the nodes of a hostfile, started by hand on each of them"),
    "slurm": ("slurm.sbatch", "a Slurm job: outside of one it submits itself"),
}
BY_SSH = ("pdsh", "openmpi", "mpich")
EPILOG = """\
Without a script, launch/pretrain.py runs with ds_configs/zero2_scape99_fp32.json (bf16 where there are GPUs); its own
options go behind `--`. Every rank gets the variables of ~/.deepspeed_env and ./.deepspeed_env. docs/multinode.md
tells more."""


def build_parser(launcher: str) -> argparse.ArgumentParser:
    """The parser of one launch script."""
    script, summary = LAUNCHERS[launcher]
    parser = argparse.ArgumentParser(
        prog=f"launch/{script}",
        usage=f"bash launch/{script} [options] [SCRIPT [arguments] | --module MODULE [arguments] | -- pretrain.py's]",
        description=f"Runs {summary}.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--dry-run", action="store_true", help="check everything and print the command, start nothing")
    add("--module", metavar="MODULE", help="run a module; deepspeed_scape.run registers SCAPE for a script")
    add("--master-port", type=int, metavar="PORT", help="where the ranks meet (default: a free one, if it can be seen)")
    if launcher == "one-node":
        add("--ranks", type=int, metavar="N", help="default: one a GPU; on CPUs 2")
    else:
        add("--interface", metavar="NAME", help="for the ranks' sockets (default: that to the first node)")
    if launcher in (*BY_SSH, "no-ssh"):
        add("--hostfile", metavar="FILE", help="one `NAME slots=N` a node (default: hostfile, else /job/hostfile)")
        add("--master-addr", metavar="ADDRESS", help="of the first node (default: what its name resolves to)")
    if launcher in BY_SSH:
        add("--no-remote-checks", action="store_true", help="don't ask the nodes over ssh before the start")
    if launcher == "pdsh":
        add("--ssh-port", type=int, metavar="PORT", help="default: what ssh's configuration says")
    if launcher == "no-ssh":
        add("--node-rank", type=int, metavar="N", help="line of this machine in the hostfile, from 0 (default: found)")
    if launcher == "slurm":
        add("--sbatch", default="", metavar="OPTIONS", help='for sbatch, behind `=`: --sbatch="--nodes=4 -p gpu"')
    add("job", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def parse(arguments: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """The launcher and its options. Exits with status 2 for wrong ones, with 0 after ``--help``.

    Help goes to standard error: standard output is for the shell.
    """
    if not arguments or arguments[0] not in LAUNCHERS:
        sys.exit(f"preflight: the first argument is one of {', '.join(LAUNCHERS)}")
    parser = build_parser(arguments[0])
    if "-h" in arguments[1:2] or "--help" in arguments[1:2]:
        parser.print_help(sys.stderr)
        print("exit 0")
        sys.exit(0)
    return arguments[0], parser.parse_args(arguments[1:])
