# SPDX-License-Identifier: Apache-2.0
"""A stand-in for AMD's `mori` (distribution amd-mori) on machines without its hardware."""
