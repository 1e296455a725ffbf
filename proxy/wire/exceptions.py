# SPDX-License-Identifier: Apache-2.0
"""Exception groups, as `asyncio.TaskGroup` raises them."""

from __future__ import annotations

from collections.abc import Iterator


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """The exceptions of a group, and of the groups within it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
