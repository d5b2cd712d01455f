"""The README's generated sections are what its generator says."""

from evals.readme import ROOT, filled


def test_readme_is_up_to_date() -> None:
    text = (ROOT / "README.md").read_text()
    assert filled(text) == text, "run python -m evals.readme"
    assert text.count("<!-- /") == 7
