# SPDX-License-Identifier: Apache-2.0
"""What schemathesis loads beside the document (by `SCHEMATHESIS_HOOKS`)."""

from __future__ import annotations

from typing import Any

import schemathesis

INTEGERS = (
    "prompt",
    "n",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "logprobs",
    "top_logprobs",
)


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """Leave out numbers such as 64.0: JSON Schema calls them integers, and we do not."""
    return not isinstance(case.body, dict) or not any(_holds_float(case.body.get(name)) for name in INTEGERS)


def _holds_float(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, list) and any(map(_holds_float, value)))
