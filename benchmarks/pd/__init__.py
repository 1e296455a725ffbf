# SPDX-License-Identifier: Apache-2.0
"""`make bench-pd`: pairs of vLLM servers on GPUs, by our connector and by vLLM's own."""
