# SPDX-License-Identifier: Apache-2.0
"""Shared by several backends; imports none of them."""
