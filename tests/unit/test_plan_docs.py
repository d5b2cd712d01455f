"""The examples of docs/planner.md print what they say they print."""

from evals.docs import PAGE, PREFIX, filled


def test_planner_page_is_up_to_date() -> None:
    text = PAGE.read_text()
    assert text.count(PREFIX) == 4
    assert filled(text) == text, "run python -m evals.docs"
