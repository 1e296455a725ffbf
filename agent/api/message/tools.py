# SPDX-License-Identifier: Apache-2.0
"""The tools of a chat's body, and whether they may or must be called. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvferry.agent.errors import bad_request

MAX_TOOLS = 128
"""As many as OpenAI takes."""
MAX_TOOLS_BYTES = 256 * 1024
"""Largest `tools`, in bytes of JSON."""
MAX_DESCRIPTION_CHARS = 16 * 1024
MAX_SCHEMA_DEPTH = 64
"""How deep objects and arrays may be nested."""
_ANY_ARGUMENTS = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
"""As long as Anthropic's; OpenAI's have half of that."""
Description = Annotated[str, Meta(max_length=MAX_DESCRIPTION_CHARS)]


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a model may call; with `strict` its arguments match `parameters` even if no call is forced."""

    name: ToolName
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function

    def shown(self) -> dict[str, Any]:
        """Return the tool as a chat template shows it to the model."""
        function = msgspec.to_builtins(self.function)
        function.pop("strict", None)
        return {"type": self.type, "function": function}


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: ToolName


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a body says of tools: its `tools`, `tool_choice` and `parallel_tool_calls`."""

    given: Sequence[Tool]
    choice: ToolChoice
    parallel: bool

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools that the model may call."""
        return () if self.choice == "none" else self.given

    @property
    def must_call(self) -> bool:
        """Whether the answer is to be a call, which is constrained to be one."""
        return self.choice == "required" or isinstance(self.choice, NamedTool)

    @property
    def one_call(self) -> bool:
        """Whether the answer may have no more calls than one."""
        return not self.parallel or isinstance(self.choice, NamedTool)

    @property
    def constrains(self) -> bool:
        """Whether calls are constrained to be valid."""
        return self.must_call or any(tool.function.strict for tool in self.tools)

    def schemas(self) -> dict[str, dict[str, Any]]:
        """Return the schemas that arguments must match, by the names of the tools that may be called."""
        name = self.choice.function.name if isinstance(self.choice, NamedTool) else None
        functions = [tool.function for tool in self.tools]
        return {each.name: self._schema(each) for each in functions if name in (None, each.name)}

    def _schema(self, function: Function) -> dict[str, Any]:
        if not (self.must_call or function.strict):
            return _ANY_ARGUMENTS
        return _NO_ARGUMENTS if function.parameters is None else function.parameters

    def check(self) -> None:
        """Raise `ApiError` 400 where these fields do not fit each other."""
        names = [tool.function.name for tool in self.given]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise bad_request(f"tools has two functions {twice}", "tools")
        if any(_depth(tool.function.parameters) > MAX_SCHEMA_DEPTH for tool in self.given):
            raise bad_request(f"tools: a schema may be {MAX_SCHEMA_DEPTH} objects deep", "tools")
        if self.must_call and not names:
            raise bad_request("tool_choice needs tools", "tool_choice")
        if isinstance(self.choice, NamedTool) and self.choice.function.name not in names:
            message = f"tool_choice names {self.choice.function.name}, which tools has not"
            raise bad_request(message, "tool_choice")


def _depth(value: object) -> int:
    """Return how deep objects and arrays are in each other, up to just beyond `MAX_SCHEMA_DEPTH`."""
    level, depth = [value], 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        inner = [
            each.values() if isinstance(each, dict) else each
            for each in level
            if isinstance(each, dict | list)
        ]
        depth += bool(inner)
        level = [each for part in inner for each in part]
    return depth
