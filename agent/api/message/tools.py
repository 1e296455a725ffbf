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
"""Of `tools`, as JSON."""
MAX_DESCRIPTION_CHARS = 16 * 1024
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Description = Annotated[str, Meta(max_length=MAX_DESCRIPTION_CHARS)]


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a model may call. `strict` holds for calls that are constrained, and changes nothing else."""

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

    def forced_schemas(self) -> dict[str, dict[str, Any]]:
        """Return the schemas of the tools of which one is to be called, by name."""
        name = self.choice.function.name if isinstance(self.choice, NamedTool) else None
        functions = [tool.function for tool in self.tools]
        return {
            each.name: _NO_ARGUMENTS if each.parameters is None else each.parameters
            for each in functions
            if name in (None, each.name)
        }

    def check(self) -> None:
        """Raise `ApiError` 400 where these fields do not fit each other."""
        names = [tool.function.name for tool in self.given]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise bad_request(f"tools has two functions {twice}", "tools")
        if self.must_call and not names:
            raise bad_request("tool_choice needs tools", "tool_choice")
        if isinstance(self.choice, NamedTool) and self.choice.function.name not in names:
            message = f"tool_choice names {self.choice.function.name}, which tools has not"
            raise bad_request(message, "tool_choice")
