# SPDX-License-Identifier: Apache-2.0
"""The ranks of one engine, as a group and one by one."""
