"""What docs/ takes from a program is what the program says."""

from evals.docs import MEMORY, PAGE, PREFIX, pages


def test_filled_pages_are_up_to_date() -> None:
    assert PAGE.read_text().count(PREFIX) == 4 and "| SCAPE 99%, bf16" in MEMORY.read_text()
    for page, text in pages().items():
        assert page.read_text() == text, f"{page}: run python -m evals.docs"
