# SPDX-License-Identifier: Apache-2.0
"""Defects of vLLM's NixlConnector, made small enough to be reported."""
