# SPDX-License-Identifier: Apache-2.0
"""What tests of more than one folder use: waiting, clients, processes. Stand-ins are in `tests/standins`."""
