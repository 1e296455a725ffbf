# SPDX-License-Identifier: Apache-2.0
"""What operators, and clients that ask about the fleet, see and may do."""
