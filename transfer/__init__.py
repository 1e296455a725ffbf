# SPDX-License-Identifier: Apache-2.0
"""Moves KV blocks between two engines and proves that they arrived."""
