# SPDX-License-Identifier: Apache-2.0
"""What a chaos run makes of each answer, and of all of them."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from tests.helpers.client import Answer, Choice, RequestFailed

TIE = 1e-3
"""A difference where the reference's decision margin is smaller proves nothing."""
MIN_COMPARED = 0.95
MIN_ANSWERED = 0.5
HARDSHIPS = (
    "kill",
    "stop",
    "prefill kvferry_transfer_leases_ended_total expired",
    "decode kvferry_transfer_failures_total invalid",
    "decode kvferry_agent_recomputes_total",
)
"""What a long run must have seen: a lease that ended while its blocks were read shows as `invalid`."""


class Verdict(enum.StrEnum):
    RIGHT = "right"
    TIE = "tie"
    """Differs from the reference, at first where the decision was nearly even."""
    WRONG = "wrong"
    FAILED = "failed"
    """With a typed error, as it may."""
    UNTYPED = "untyped"
    """The answer broke off, or its error lacks a status or a code."""
    HUNG = "hung"
    LEFT = "left"
    """Its client went away on purpose, before there was an answer."""


class ClientLeft(Exception):
    """The client went away on purpose."""


@dataclass(slots=True)
class Tally:
    """Everything that was seen in one run."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    """What the run did, and what the agents counted (those that were killed took their counts along)."""
    wrongs: list[str] = field(default_factory=list)
    """One line for each thing that must not be."""

    def add(self, what: str, result: object, reference: Answer) -> None:
        """Judge one request's result."""
        verdict = judge(result, reference)
        self.verdicts[verdict] += 1
        if isinstance(result, RequestFailed):
            self.failures[f"{result.status or 'in stream'} {result.error.get('code')}"] += 1
        if verdict in (Verdict.WRONG, Verdict.UNTYPED, Verdict.HUNG):
            self.wrongs.append(f"{verdict}: {what}: {result!r}")

    def count(self, words: str) -> int:
        """How often something happened whose name begins with these words."""
        return sum(count for name, count in self.events.items() if name.startswith(words))

    def complaints(self) -> list[str]:
        """Why the run has failed; empty if it has not."""
        total = self.verdicts.total() - self.verdicts[Verdict.LEFT]
        compared = self.verdicts[Verdict.RIGHT] + self.verdicts[Verdict.WRONG]
        answered = compared + self.verdicts[Verdict.TIE]
        found = list(self.wrongs)
        if compared < MIN_COMPARED * answered:
            found.append(f"only {compared} of {answered} answers could be compared")
        if answered < MIN_ANSWERED * total:
            found.append(f"only {answered} of {total} requests were answered")
        return found

    def missing(self) -> list[str]:
        """What did not happen, though a long run is to show that it is survived."""
        return [f"there was no {words!r}" for words in HARDSHIPS if not self.count(words)]

    def summary(self) -> str:
        """The run so far in a line."""
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.verdicts.items())
        return f"{self.verdicts.total()} asked: {counts}; {len(self.wrongs)} complaints"

    def table(self) -> str:
        """The run in figures."""
        rows = [(f"answers {verdict}", self.verdicts[verdict]) for verdict in Verdict]
        rows += [(f"error {word}", count) for word, count in sorted(self.failures.items())]
        rows += sorted(self.events.items())
        return "\n".join(f"  {name:<44}{count:>8}" for name, count in rows)


def judge(result: object, reference: Answer) -> Verdict:
    """One request's result: an answer, or the exception that its client raised."""
    if isinstance(result, Answer):
        return compare(result, reference)
    if isinstance(result, RequestFailed):
        typed = bool(result.error.get("code")) and (result.status is None or result.status >= 400)
        return Verdict.FAILED if typed else Verdict.UNTYPED
    if isinstance(result, ClientLeft):
        return Verdict.LEFT
    return Verdict.HUNG if isinstance(result, TimeoutError) else Verdict.UNTYPED


def compare(answer: Answer, reference: Answer) -> Verdict:
    """Every choice to its end; after a tie the rest may differ."""
    if answer.choices.keys() != reference.choices.keys():
        return Verdict.WRONG
    verdicts = {_compare(choice, reference.choices[index]) for index, choice in answer.choices.items()}
    if Verdict.WRONG in verdicts:
        return Verdict.WRONG
    if Verdict.TIE in verdicts:
        return Verdict.TIE
    same = (answer.prompt_tokens, answer.completion_tokens) == (
        reference.prompt_tokens,
        reference.completion_tokens,
    )
    return Verdict.RIGHT if same else Verdict.WRONG


def _compare(choice: Choice, reference: Choice) -> Verdict:
    for token, expected, margin in zip(
        choice.token_ids, reference.token_ids, reference.margins, strict=False
    ):
        if token != expected:
            return Verdict.TIE if margin is not None and margin <= TIE else Verdict.WRONG
    same = (choice.token_ids, choice.text, choice.finish_reason) == (
        reference.token_ids,
        reference.text,
        reference.finish_reason,
    )
    return Verdict.RIGHT if same else Verdict.WRONG
