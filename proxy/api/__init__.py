# SPDX-License-Identifier: Apache-2.0
"""What clients and operators call."""
