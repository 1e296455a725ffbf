# SPDX-License-Identifier: Apache-2.0
"""The canary: compares the answers of pairs with those of one server, and takes out pairs that differ."""
