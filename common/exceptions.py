# SPDX-License-Identifier: Apache-2.0
"""Exception groups, as `asyncio.TaskGroup` raises them; what exceptions say, and what they keep alive."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator

import msgspec

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not the expected JSON; not only its own errors."""


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """The exceptions of a group, and of the groups within it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error


def message_of(error: BaseException) -> str:
    """Return what an exception says to a user: of the system's errors file and reason, not the number."""
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, str | os.PathLike):
        return f"{os.fspath(error.filename)}: {error.strerror}"
    return str(error)


def system_reason(error: OSError) -> str:
    """Return the system's own words for an error, whatever the library that raised it says."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)


def release_locals(error: BaseException) -> None:
    """Clear the local variables of all frames that an exception has left, and those it came of.

    To be called where it is handled for good. It refers to those frames and they often to it; so what they
    hold, be it megabytes, would stay until the next full garbage collection, which may be minutes away.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        pending += (each.__cause__, each.__context__)
        if isinstance(each, BaseExceptionGroup):
            pending += each.exceptions
