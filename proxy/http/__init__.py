# SPDX-License-Identifier: Apache-2.0
"""HTTP to agents and from clients: the hand-built hot path."""
