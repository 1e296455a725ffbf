# SPDX-License-Identifier: Apache-2.0
"""The prefill side: leases, and what is said about them."""
