# SPDX-License-Identifier: Apache-2.0
"""What the processes of an agent send each other; all that they share."""
