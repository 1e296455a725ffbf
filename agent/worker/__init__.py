# SPDX-License-Identifier: Apache-2.0
"""One tensor-parallel rank: computes steps."""
