// SPDX-License-Identifier: Apache-2.0
// All that the headers of mori.io need to know of HIP: the size of a handle that only GPUs use.
#pragma once

struct hipIpcMemHandle_t {
  char reserved[64];
};
