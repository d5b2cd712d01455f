"""lm-eval's wrapper of a transformers model, for answers longer than the model's window too."""

from __future__ import annotations

from typing import Any

from lm_eval.models.huggingface import HFLM

Request = tuple[Any, list[int], list[int]]  # key of the cache, tokens of the context, tokens of the answer


class WindowedLM(HFLM):
    """As HFLM, which cuts a long context on the left but refuses an answer longer than the window.

    Such an answer is scored in pieces of half a window, each given the window before it; their log-likelihoods are
    added up.
    """

    def _loglikelihood_tokens(self, requests: list[Request], **kwargs: Any) -> list[tuple[float, bool]]:
        pieces = [cut(request, self.max_length) for request in requests]
        scores = iter(super()._loglikelihood_tokens([p for some in pieces for p in some], **kwargs))
        together = ([next(scores) for _ in some] for some in pieces)
        return [(sum(ll for ll, _ in parts), all(greedy for _, greedy in parts)) for parts in together]


def cut(request: Request, window: int) -> list[Request]:
    """The request itself if its answer fits the window of so many tokens, else its pieces."""
    _, context, answer = request
    if len(answer) <= window:
        return [request]
    half = max(1, window // 2)
    return [(None, context + answer[:at], answer[at : at + half]) for at in range(0, len(answer), half)]
