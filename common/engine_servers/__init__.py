# SPDX-License-Identifier: Apache-2.0
"""Servers of other engines that announce nothing: as an operator describes them, probed and watched."""
