"""Step time of SCAPE and its peers on hosts joined by a slow network, all on this machine.

    sudo python -m evals.network                         # the table: 2 and 4 hosts, four bandwidths, under 15 minutes
    sudo python -m evals.network --hosts 2 --mbit 200 --methods zero2 scape99 --rounds 3
    sudo python -m evals.network timeline                # what runs when in a step: a trace and a picture
    sudo python -m evals.network loss --corpus FOLDER    # wall-clock to one validation loss on a 200 Mbit link
    sudo python -m evals.network scaling                 # parameters from 1 M to 200 M, ranks from 2 to 8
    python -m evals.network report                       # network.md once more from network.csv; measures nothing

All others need root (network namespaces, tc), ends with everything taken down, Ctrl-C included, and writes to
evals/results/. Times are only worth something on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from evals.files import write
from evals.network import predict
from evals.network.hosts import HostsUnavailable, missing
from evals.network.measure import Settings, compare
from evals.network.methods import METHODS
from evals.network.predict import check_all
from evals.network.ranks import RankFailed
from evals.network.report import Table, as_csv, markdown, read_table
from evals.provenance import provenance
from launch.corpus import embedded
from launch.models import PRESETS
from launch.tokens import prepare_tokens

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "evals" / "results"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evals.network", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="table", choices=["table", "timeline", "loss", "scaling", "report"])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], help="one rank each")
    parser.add_argument("--mbit", nargs="+", default=["unshaped", "1000", "200", "100"], help="Mbit/s, or unshaped")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD",
                        help=f"of {', '.join(METHODS)}")  # fmt: skip
    parser.add_argument("--preset", default="gpt-10m", choices=list(PRESETS), metavar="PRESET", help="gpt-10m, gpt-25m")
    parser.add_argument("--seq", type=int, help="tokens a sample; default: the preset's")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples a rank and step")
    parser.add_argument("--rounds", type=int, default=8, help="of what is close; peers get at most 3")
    parser.add_argument("--steps", type=int, help="of a block, default 3; of a training run (loss), default 3000")
    parser.add_argument(
        "--minutes", type=float, default=14.4, help="for the whole table; fewer rounds when it gets late"
    )
    parser.add_argument(
        "--corpus", type=Path, default=ROOT.parent / "shared" / "data" / "corpus", help="loss: the novels"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "network", help="logs, token files, training runs")
    return parser


def bandwidths(words: list[str]) -> tuple[float | None, ...]:
    """Mbit/s of each word, None for ``unshaped``.

    Raises:
        ValueError: neither a positive number nor that word.
    """
    out: list[float | None] = []
    for word in words:
        try:
            mbit = None if word == "unshaped" else float(word)
        except ValueError:
            mbit = -1.0
        if mbit is not None and not 0 < mbit < float("inf"):
            raise ValueError(f"--mbit {word}: give a positive number of Mbit/s, or `unshaped`")
        out.append(mbit)
    return tuple(out)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for what can't be run."""
    bandwidths(args.mbit)
    if bad := [n for n in args.hosts if not 2 <= n <= 100]:
        raise ValueError(f"--hosts {bad[0]}: between 2 and 100 (one rank a host)")
    for name in ("rounds", "micro_batch", "seq", "steps", "minutes"):
        value = getattr(args, name)
        if value is not None and value < (1 if name != "minutes" else 0):
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least {1 if name != 'minutes' else 0}")
    for name in args.methods:
        if METHODS[name].like and METHODS[name].like not in args.methods:
            raise ValueError(f"--methods {name}: sends the bytes of {METHODS[name].like}; name that one too")


def settings_of(args: argparse.Namespace) -> Settings:
    """The comparison that the command line asks for; builds the token files."""
    cache = args.runs / "tokens"
    preset = PRESETS[args.preset]
    return Settings(
        preset=args.preset,
        seq=args.seq or preset.seq,
        micro_batch=args.micro_batch,
        mbits=bandwidths(args.mbit),
        methods=tuple(name for name in METHODS if name in args.methods),
        rounds=args.rounds,
        steps=args.steps or 3,
        cache=cache,
        tokens_key=prepare_tokens(embedded(), preset.vocab, cache),
        logs=args.runs / "logs",
    )


def where_from(args: argparse.Namespace) -> dict[str, str]:
    """Provenance of this run's figures."""
    words = shlex.join(sys.argv[1:])
    tokens = args.micro_batch * (args.seq or PRESETS[args.preset].seq)
    command = f"python -m evals.network {words}".strip()
    return provenance() | {"command": command, "preset": args.preset, "tokens": str(tokens)}


def run_table(args: argparse.Namespace, where: dict[str, str], say: Any) -> None:
    settings, rows = settings_of(args), []
    for count in args.hosts:
        minutes = args.minutes * (count + 6) / sum(n + 6 for n in args.hosts)  # all ranks share the machine's cores
        rows += compare(count, replace(settings, minutes=minutes), say)
        table = Table(rows)  # written after every number of hosts: a later failure costs only what it was at
        write(args.output / "network.csv", as_csv(table, where))
        text = write_report(args, table, where)
    print(text)


def write_report(args: argparse.Namespace, table: Table, where: dict[str, str]) -> str:
    """Write network.md and return it."""
    checks = check_all(table)
    text = markdown(table, where) + (f"\n{predict.markdown(checks)}" if checks else "")
    write(args.output / "network.md", text)
    return text


def run(args: argparse.Namespace) -> None:
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    where = where_from(args)  # now: the tree may change while it runs
    if args.what == "table":
        run_table(args, where, say)
    elif args.what == "timeline":
        from evals.network.timeline import run_timeline

        run_timeline(args, settings_of(args), where, say)
    elif args.what == "loss":
        from evals.network.loss import run_loss

        run_loss(args, where, say)
    else:
        from evals.network.scaling import run_scaling

        run_scaling(args, settings_of(args), where, say)
    say("done, everything is taken down")


def interrupted(number: int, frame: Any) -> NoReturn:
    """A signal that would end us at once ends us through the same doors as Ctrl-C."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    try:
        check(args)
    except ValueError as error:
        parser.error(str(error))
    if args.what == "report":
        print(write_report(args, *read_table(args.output / "network.csv")))
        return
    if lacks := missing():
        sys.exit("evals.network can't build its hosts here:\n" + "\n".join(f"  - {line}" for line in lacks))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a background job may have been started deaf
        signal.signal(number, interrupted)
    try:
        run(args)
    except KeyboardInterrupt:
        sys.exit("interrupted; everything is taken down")
    except (HostsUnavailable, RankFailed, ValueError) as error:
        sys.exit(f"evals.network: error: {error}\neverything is taken down")
    finally:
        give_back(args)


def give_back(args: argparse.Namespace) -> None:
    """Under sudo the files belong to root; give them to whoever called it."""
    uid, gid = os.environ.get("SUDO_UID"), os.environ.get("SUDO_GID")
    if uid and gid and os.geteuid() == 0:
        for folder in (args.output, args.runs):
            for path in [folder, *folder.rglob("*")]:
                if path.exists() and path.stat().st_uid == 0:
                    os.chown(path, int(uid), int(gid))


if __name__ == "__main__":
    main()
