# SPDX-License-Identifier: Apache-2.0
"""Grammars that constrain answers: which tokens may come next."""
