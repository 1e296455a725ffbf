# SPDX-License-Identifier: Apache-2.0
"""The decode side: pulls, links to producers, quarantine."""
