"""Put measured tables and the list of options into the README.

python -m evals.readme            # writes
python -m evals.readme --check    # fails when the README says something else
"""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from deepspeed_scape.config import ScapeOptions
from evals.files import with_section
from evals.network.report import Table, host_table, note, read_table
from evals.quality.groups import DENSE_STEPS, GROUPS
from evals.quality.results import Results
from evals.quality.table import group_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "evals" / "results"
SHOWN = ("compute", "ddp", "ddp-bf16", "powersgd", "zero2", "scape90", "scape99", "mock99")  # of the network table


def options_table() -> str:
    """Every option of SCAPE from its pydantic model."""
    lines = ["| option | default | range | meaning |", "|---|---|---|---|"]
    for name, field in ScapeOptions.model_fields.items():
        lines.append(f"| `{name}` | {_default(field)} | {_range(field)} | {field.description} |")
    return "\n".join(lines)


def _default(field: FieldInfo) -> str:
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{json.dumps(default)}`"


def _range(field: FieldInfo) -> str:
    choices = getattr(field.annotation, "__args__", ())
    if all(isinstance(choice, str) for choice in choices) and choices:
        return " or ".join(f'`"{choice}"`' for choice in choices)
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [f"{signs[k]} {v:g}" for m in field.metadata for k, v in vars_of(m).items() if k in signs]
    return ", ".join(bounds) or {bool: "true or false"}.get(field.annotation, "each in [0, 1)")  # type: ignore[arg-type]


def vars_of(constraint: Any) -> dict[str, Any]:
    """The fields of an annotated-types constraint."""
    return {k: getattr(constraint, k) for k in ("ge", "gt", "le", "lt") if hasattr(constraint, k)}


def first_result() -> str:
    """The table of evals.first_result with where it comes from; empty before it has been run."""
    path = RESULTS / "first_result.json"
    if not path.exists():
        return ""
    result = json.loads(path.read_text())
    runs, where = result["runs"], result["provenance"]
    commits = sorted({run["commit"][:7] for run in runs if run["commit"]})
    one = runs[0]
    note = (
        f"`small` ({one['params']:,} parameters), {one['steps']:,} steps, {one['tokens']:,} tokens of public-domain "
        f"novels, 2 ranks, ZeRO-2, fp32, one seed, no dense steps first; validation on two held-out novels. Each "
        f"method's rate was chosen by its training loss on text seen once. `python -m evals.first_result --corpus "
        f"FOLDER`, commits {', '.join(commits)}, {where['date']}, {where['hardware']}; all runs in "
        f"[evals/results/first_result.json](evals/results/first_result.json)."
    )
    return f"{(RESULTS / 'first_result.md').read_text().strip()}\n\n{note}"


def quality() -> str:
    """The main group of evals.quality, three seeds, once a seed of SCAPE has finished."""
    results = Results()
    finished = [results.finals(entry) for entry in GROUPS["main"]]
    runs = [run for finals in finished for run in finals]
    if all(entry.dense for entry, finals in zip(GROUPS["main"], finished, strict=True) if finals):
        begun = "; what has finished: [evals/results/quality.md](evals/results/quality.md)" if runs else ""
        return f"Over three seeds: not measured yet (`python -m evals.quality --corpus FOLDER`, a night){begun}."
    commits = sorted({run["provenance"]["commit"] for run in runs})
    where = runs[0]["provenance"]
    note = (
        f"{runs[0]['params']:,} parameters, {runs[0]['spec']['steps']:,} steps, {runs[0]['tokens']:,} tokens "
        f"seen once, SCAPE with {DENSE_STEPS} dense steps first, 3 seeds by which nothing was chosen, at rates tuned "
        "with another; differences are to the better dense method, paired by "
        "seed ([protocol](evals/README.md#the-quality-proof)). `python -m evals.quality --corpus FOLDER --only main`, "
        f"{'commits' if len(commits) > 1 else 'commit'} {', '.join(commits)}, {where['date']}, {where['hardware']}; "
        "ablations, ballots and all else: [evals/results/quality.md](evals/results/quality.md)."
    )
    head, rule, *rows = group_table("main", results)
    shown = [row for row, finals in zip(rows, finished, strict=True) if finals]
    return "\n".join([head, rule, *shown]) + f"\n\n{note}"


def network() -> str:
    """Step times on a slow network, from evals.network: two hosts, the methods that a user would choose between."""
    path = RESULTS / "network.csv"
    if not path.exists():
        return "Not measured yet on a quiet machine: `sudo python -m evals.network`."
    table, where = read_table(path)
    slow = Table([row for row in table.rows if row.mbit is not None], table.cores)
    hosts = " and ".join(str(count) for count in sorted({count for count, _ in table.settings}))
    return "\n".join(host_table(slow, 2, SHOWN)) + (
        f"\n\nTwo hosts. {note(where)} All methods and targets on {hosts} hosts: "
        "[evals/results/network.md](evals/results/network.md)." + _wall_clock()
    )


def _wall_clock() -> str:
    """Time to one validation loss on a slow link, from evals.network loss; empty before it has been run."""
    path = RESULTS / "loss.md"
    if not path.exists():
        return ""
    anywhere = re.sub(r"--corpus \S+?(?=[\s`])", "--corpus FOLDER", path.read_text().strip())
    return f"\n\nWall-clock to one loss:\n\n{anywhere}"


def overhead() -> str:
    """What the local work of a step costs, from evals.overhead."""
    path = RESULTS / "overhead.json"
    if not path.exists():
        return ""
    result = json.loads(path.read_text())
    lines = ["| sparsity | select + pack + update | memory floor of these | all local work |", "|---|---|---|---|"]
    for sparsity in result["arguments"]["sparsity"]:
        row = result[f"{sparsity:g}"]
        shares = (row["select_pack_update"], row["floor"], row["all_local_work"])
        lines.append(f"| {sparsity:.0%} | {' | '.join(f'{share:.1%}' for share in shares)} |")
    where = result["provenance"]
    note = (
        f"Of the forward and backward of {result['arguments']['preset']} at {result['arguments']['tokens']} tokens "
        f"({result['forward_backward_ms']:.0f} ms on one core), for one of {result['arguments']['world']} ranks. "
        "The floor is the time to move the cache lines these touch at the copy bandwidth of the same run. "
        f"`python -m evals.overhead`, commit {where['commit']}, {where['date']}, {where['hardware']}."
    )
    return "\n".join(lines) + f"\n\n{note}"


def kernels() -> str:
    """Time of every kernel on a GPU, from evals.kernels; what is not measured is not there."""
    path = RESULTS / "kernels_cuda.csv"
    if not path.exists():
        return "not measured on a GPU"
    rows = list(csv.DictReader(path.open()))
    lines = ["| kernel | elements | sparsity | ms | torch, ms | of the copy bandwidth |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['kernel']} | {int(row['elements']):,} | {float(row['sparsity']):.0%} | {float(row['ms']):.3f} | "
            f"{float(row['torch_ms']):.3f} | {float(row['copy_share']):.0%} |"
        )
    where = rows[0]
    note = (
        f"`python -m evals.kernels`, commit {where['commit']}, {where['date']}, {where['hardware']}, torch "
        f"{where['torch']}, Triton {where['triton']}; copy at {where['copy_gb_s']} GB/s."
    )
    return "\n".join(lines) + f"\n\n{note}"


def compatibility() -> str:
    """On which versions the tests pass, from evals.compatibility."""
    path = RESULTS / "compatibility.json"
    if not path.exists():
        return "Not measured yet: `python -m evals.compatibility`."
    results = json.loads(path.read_text())
    lines = ["| DeepSpeed | torch | Python | passed | failed | skipped | commit |", "|---|---|---|---|---|---|---|"]
    for row in results.values():
        lines.append(
            f"| {row['deepspeed']} | {row['torch']} | {row['python']} | {row['passed']} | {len(row['failed'])} | "
            f"{row['skipped']} | {row['run']['commit']} |"
        )
    again = {name for row in results.values() for name in row.get("passed_again", [])}
    failed = {name for row in results.values() for name in set(row["failed"]) - set(row.get("passed_again", []))}
    told = "".join(f" Failed: `{name}`." for name in sorted(failed))
    if again:
        names = ", ".join(f"`{name}`" for name in sorted(again))
        told += f" Failed beside other work and passed with `--failed`, alone: {names}."
    note = "`python -m evals.compatibility`: the tests of CI's command, one environment a row."
    return "\n".join(lines) + f"\n\n{note}{told}"


def filled(text: str) -> str:
    """``text`` with every marked section replaced."""
    sections = {
        "network": network(),
        "first_result": first_result(),
        "quality": quality(),
        "options": options_table(),
        "overhead": overhead(),
        "kernels": kernels(),
        "compatibility": compatibility(),
    }
    for name, content in sections.items():
        text = with_section(text, name, content)
    return text


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text()
    if "--check" in sys.argv:
        sys.exit(None if filled(text) == text else "README.md is out of date: run python -m evals.readme")
    path.write_text(filled(text))


if __name__ == "__main__":
    main()
