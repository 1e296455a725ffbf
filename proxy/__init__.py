# SPDX-License-Identifier: Apache-2.0
"""Knows the agents and takes one request through a pair of them."""
