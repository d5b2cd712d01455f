"""Tables of a group of the sweep: mean and spread over the fresh seeds, paired differences, visits."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from evals.quality.groups import GROUPS, Entry
from evals.quality.results import Result, Results, final_loss

HEAD = (
    "| method | lr (tuning loss of those tried) | val loss, nats/token: mean ± sd (seeds) | paired difference ± se "
    "| visits by masks | never sent | bytes/step/rank |"
)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Of two entries' losses, seed by seed: the same seed is the same initial weights and the same data."""

    mean: float
    error: float  # standard error of the mean; nan for one seed
    share: float  # of the reference's mean loss


def losses(finals: list[Result]) -> dict[int, float]:
    """Validation loss by seed, diverged runs as infinity."""
    return {r["spec"]["seed"]: final_loss(r) for r in finals}


def difference(finals: list[Result], reference: list[Result]) -> Difference | None:
    """Paired over the seeds that both have; None where there are none."""
    ours, theirs = losses(finals), losses(reference)
    seeds = sorted(set(ours) & set(theirs))
    gaps = [ours[seed] - theirs[seed] for seed in seeds]
    if not gaps or not all(map(math.isfinite, gaps)):
        return None
    mean = statistics.fmean(gaps)
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    return Difference(mean=mean, error=error, share=mean / statistics.fmean(theirs[seed] for seed in seeds))


def reference_of(entry: Entry, entries: list[Entry], results: Results) -> Entry | None:
    """What an entry is compared with: the better dense method of its group, else what it is a change of."""
    dense = [(statistics.fmean(losses(found).values()), e) for e in entries if e.dense and (found := results.finals(e))]
    if dense:
        return min(dense, key=lambda pair: pair[0])[1]
    return entry.rate_of


def group_table(name: str, results: Results) -> list[str]:
    """Markdown lines; entries without a finished seed show what has been tuned so far."""
    entries = list(GROUPS[name])
    bases = [base for base in dict.fromkeys(e.rate_of.name for e in entries if e.rate_of) if base]
    known = {e.name for e in entries}
    above = [e.rate_of for e in entries if e.rate_of is not None]
    first = {base.name: base for base in above if base.name in bases and base.name not in known}
    rows = [_row(entry, [*first.values(), *entries], results) for entry in [*first.values(), *entries]]
    return [HEAD, "|---|---|---|---|---|---|---|", *rows]


def _row(entry: Entry, entries: list[Entry], results: Results) -> str:
    finals = results.finals(entry)
    by_seed = losses(finals)
    chosen = results.chosen_rate(entry)
    reference = reference_of(entry, entries, results)
    gap = difference(finals, results.finals(reference)) if reference is not None else None
    cells = [
        entry.name,
        _rates(entry, chosen, results),
        _mean(list(by_seed.values())),
        "" if gap is None else "the reference" if reference is entry else _gap(gap),
        f"{entry.run(chosen, entry.seeds[0]).visits:,.0f}" if finals and chosen else "",
        f"{finals[0]['visits']['never']:.1%}" if finals and finals[0]["visits"] else "",
        f"{finals[0]['bytes_per_step']:,.0f}" if finals and finals[0]["bytes_per_step"] else "",
    ]
    return f"| {' | '.join(cells)} |"


def _gap(gap: Difference) -> str:
    return f"{gap.mean:+.4f}{_plus_minus(gap.error)} ({gap.share:+.2%})"


def _rates(entry: Entry, chosen: float | None, results: Results) -> str:
    if entry.rate_of is not None:
        return f"{chosen:g}, of {entry.rate_of.name}" if chosen else ""
    tried = ", ".join(f"{lr:g}: {loss:.4f}" for lr, loss in results.tuning(entry).items() if loss is not None)
    return f"{chosen:g} ({tried})" if chosen else f"({tried})"


def _mean(values: list[float]) -> str:
    if not values:
        return ""
    spread = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan
    return f"{statistics.fmean(values):.4f}{_plus_minus(spread)} ({len(values)})"


def _plus_minus(spread: float) -> str:
    return f" ± {spread:.4f}" if math.isfinite(spread) else ""
