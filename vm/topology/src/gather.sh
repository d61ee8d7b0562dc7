# shellcheck shell=sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Writes the files that hwloc reads to the standard output: "== FOLDER", then a line "FILE:TEXT" for each line of each file below it. A file
# that ends in "#" is written as hexadecimal bytes, one that ends in "/" is a folder. It needs grep, find and od of any kind.
set -u
section() {
	cd "$1" 2>/dev/null && echo "== $1"
}
if section /sys/devices/system/cpu; then
	grep -sH '' online possible present
	find . \( -path './cpu[0-9]*/online' -o -path './cpu[0-9]*/topology/*' -o -path './cpu[0-9]*/cache/index*' \) \
		-type f ! -name uevent -exec grep -sH '' {} +
fi
if section /sys/devices/system/node; then
	grep -sH '' online possible has_memory has_normal_memory
	find . \( -path './node[0-9]*/cpumap' -o -path './node[0-9]*/cpulist' -o -path './node[0-9]*/distance' -o -path './node[0-9]*/meminfo' \
		-o -path './node[0-9]*/hugepages/*' -o -path './node[0-9]*/access0/initiators/*' \) -type f -exec grep -sH '' {} +
	find . -path './node[0-9]*/access0/initiators/node*' | while read -r link; do echo "$link/:"; done
fi
for device in /sys/bus/pci/devices/*; do
	if section "$device"; then
		grep -sH '' vendor device class subsystem_vendor subsystem_device revision numa_node local_cpus
		echo "config#:$(od -An -v -tx1 config | tr -d ' \n')"
	fi
done
if section /proc; then
	grep -sH '' meminfo
	grep -sHE '^(processor|vendor_id|cpu family|model|model name|stepping|physical id|core id)[[:space:]]*:' cpuinfo
	grep -sHE '^Node|^ +present' zoneinfo
fi
exit 0
