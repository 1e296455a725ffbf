# SPDX-License-Identifier: Apache-2.0
"""The constraint of an answer whose calls must be valid. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.agent.api.grammar.constraint import MAX_GRAMMAR_BYTES, Constraint, lark_constraint
from kvferry.agent.api.message.call_syntax import reasoning_rule
from kvferry.agent.api.message.message_parser import MessageFormat
from kvferry.agent.api.message.tools import ToolUse
from kvferry.agent.errors import bad_request


def call_constraint(use: ToolUse, wanted: MessageFormat, token_ids: Mapping[str, int]) -> Constraint:
    """Return what an answer must match whose calls are constrained: calls as the model writes them.

    Reasoning may come before them, in a model that has it, unless the prompt has ended it already; and so may
    content, unless a call is forced.

    Args:
        use: Which tools may be called, and how often.
        wanted: How the answer is read.
        token_ids: Of marks that are one token.

    Raises:
        ApiError: 400, this model's calls cannot be constrained, or not to so much.
    """
    form = wanted.form
    if form.calls is None:
        param = "tool_choice" if use.must_call else "tools"
        message = f"{param}: calls cannot be constrained as this model writes them; use auto, without strict"
        raise bad_request(message, param, "no_forced_calls")
    reasoning = ""
    if form.reasoning is not None:
        begin, end = form.reasoning
        begun = wanted.begun.rfind(begin) > wanted.begun.rfind(end)
        if begun or end not in wanted.begun:
            reasoning = reasoning_rule(begin, end, begun=begun, token_id=token_ids.get)
    grammar = form.calls.grammar(
        use.schemas(),
        several=not use.one_call,
        with_content=not use.must_call,
        reasoning=reasoning,
        token_id=token_ids.get,
    )
    if len(grammar.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        message = f"tools: the schemas of constrained calls may have {MAX_GRAMMAR_BYTES} bytes at most"
        raise bad_request(message, "tools")
    return lark_constraint("tools", grammar)
