"""What the checks found: what is wrong, and what the launch will do."""

from __future__ import annotations


class Findings:
    """Collected by all checks of one launch, so that a user sees every mistake at once.

    Attributes:
        wrong: one line a mistake, with name, value, reason and remedy; nothing starts while there is one.
        told: (subject, text) of what will be done, and of what is worth knowing.
    """

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.told: list[tuple[str, str]] = []

    def refuse(self, what: str, why: str, remedy: str) -> None:
        """Note a mistake: ``what`` is its name and value."""
        self.wrong.append(f"{what}: {why}; {remedy}")

    def tell(self, subject: str, text: str) -> None:
        """Note what the launch will do."""
        self.told.append((subject, text))

    def report(self) -> str:
        """All of it, as it is printed."""
        lines = [f"{subject:<12} {text}" for subject, text in self.told]
        lines += [f"wrong        {line}" for line in self.wrong]
        return "".join(f"{line}\n" for line in lines)
