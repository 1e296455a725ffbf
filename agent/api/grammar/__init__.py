# SPDX-License-Identifier: Apache-2.0
"""Grammars that constrain answers: which a body wants, and whether they can be used."""
