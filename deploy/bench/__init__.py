# SPDX-License-Identifier: Apache-2.0
"""`kvferry bench`: latencies and goodput of one or more servers of OpenAI's API under the same load."""
