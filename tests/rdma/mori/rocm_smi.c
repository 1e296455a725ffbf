// SPDX-License-Identifier: Apache-2.0
// A ROCm SMI that tells of one GPU and knows nothing about it: without one MORI ends its process, host memory or not.

int rsmi_init(unsigned long flags) { return 0; }
int rsmi_shut_down(void) { return 0; }
int rsmi_num_monitor_devices(unsigned *count) { return *count = 1, 0; }
int rsmi_dev_pci_id_get(unsigned index, unsigned long *address) { return *address = 0, 0; }
int rsmi_is_P2P_accessible(unsigned from, unsigned to, _Bool *accessible) { return *accessible = 0, 0; }
int rsmi_topo_get_link_type(unsigned from, unsigned to, unsigned long *hops, int *type) { return 2; }
int rsmi_topo_get_link_weight(unsigned from, unsigned to, unsigned long *weight) { return 2; }
int rsmi_status_string(int status, const char **text) { return *text = "none here", 0; }
