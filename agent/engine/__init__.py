# SPDX-License-Identifier: Apache-2.0
"""The engine process: schedules steps, owns the KV blocks and the leases."""
