# SPDX-License-Identifier: Apache-2.0
"""Words for what a server does, which registrations, options and pages share."""

from __future__ import annotations

from typing import Literal

Role = Literal["prefill", "decode", "both"]
TransferMode = Literal["read", "write"]
