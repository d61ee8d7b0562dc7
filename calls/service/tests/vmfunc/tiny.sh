#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Runs in the lab, with busybox' sh: tiny.sh FOLDER PROGRAM. The folder has what the test gives it (main.rs).
set -eu
folder=$1 program=$2
insmod "$folder/tombolo_service_host.ko" limit_us=200000
mount -t debugfs debugfs /sys/kernel/debug
"$folder/tiny" &
vm=$!
has_vcpu() { for fd in /proc/"$vm"/fd/*; do readlink "$fd" || :; done | grep -q kvm-vcpu; }
until has_vcpu; do sleep 0.2; done
"$program" serve kv "$folder/kv.service" --vm $vm &
kv=$!
"$program" serve odd "$folder/odd.service" --vm $vm &
odd=$!
wait $vm
kill $kv $odd
wait $kv || :
wait $odd || :
rmmod tombolo_service_host
[ ! -e /sys/module/tombolo_service_host ]
echo 'host: the module is gone'
dmesg | grep -E 'BUG|WARNING|Oops' || echo 'host: the kernel complains of nothing'
