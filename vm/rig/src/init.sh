#!/bin/busybox sh
# shellcheck shell=dash
# SPDX-License-Identifier: Apache-2.0 OR MIT
# The init of the rig's guests: loads the modules of /modules/order, runs /setup, then each line that comes over the second serial port; the
# answer is the command's output, and its exit status between the marks that the rig waits for.
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev /tmp /mnt /z /etc
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
while read -r m; do insmod "/modules/$m.ko" || echo "insmod $m failed"; done </modules/order
# An image's own script for its guests.
# shellcheck source=/dev/null
[ ! -e /setup ] || . /setup
stty -F /dev/ttyS1 raw -echo
exec 3<>/dev/ttyS1
# Orphans are children of this process, and busybox' read forgets the half of a line when a child's end interrupts it: so a process of its own
# reads the commands.
{
	echo "<<ready>>" >&3
	# The file is at a place of its own: a command that uses a file of the same name would copy that into itself.
	while read -r line <&3; do
		sh -c "$line" </dev/null >/.answer 2>&1
		rc=$?
		cat /.answer >&3
		echo "<<rc=$rc>>" >&3
	done
	poweroff -f
} &
wait
