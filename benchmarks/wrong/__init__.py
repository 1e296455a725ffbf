# SPDX-License-Identifier: Apache-2.0
"""Wrong answers under faults, of pairs of real servers on CPUs (`make bench-wrong`)."""
