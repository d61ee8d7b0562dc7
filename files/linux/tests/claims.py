#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
"""What tombolo.ko promises, tried in guests under QEMU's emulation: `claims.py [--kernel V]… [--kit SERIES]… [CLAIM…]`.

Needs QEMU, busybox-static, kmod, cargo, a C compiler, and for each kernel image, modules and headers. Without --kernel: every
kernel under /boot that has headers. --kit: kernels of the guest kit (guest/README.md) instead, nothing installed. --root DIR: where boot/ and lib/modules are, for a kernel that is unpacked, not installed.
Prints one line per claim and the counts; exit code 0 when all hold.
"""
import argparse, glob, hashlib, json, mmap, os, random, shutil, signal, struct, subprocess, sys, tempfile, time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from rig import Failed, TIMEOUT, Rig, ROOT, HERE, cargo_program

ZONE_MIB = 256
DIFFER_SEEDS = [1]
CLAIMS = []


def claim(guests, **options):
    def add(f):
        CLAIMS.append((f, guests, options))
        return f
    return add


def need(what, message):
    if not what:
        raise Failed(message)


def comes_to(guest, command, wanted):
    """What another thread of the kernel does in a moment; looked at until it is so."""
    end = time.monotonic() + TIMEOUT
    while (now := guest.ok(command)) != wanted:
        need(time.monotonic() < end, "`%s` stays %s, not %s" % (command, now, wanted))


def emptied(*guests):
    listed = {g.name: g.ok("ls -lAi /mnt") for g in guests}
    need(not any(l for l in listed.values() if l not in ("", "total 0")), "not removed: %s" % listed)


def whole(zone):
    with open(zone, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


# --- one guest ---------------------------------------------------------------------------------------------------------


@claim(1)
def reads_writes_sparse_files_and_fallocate_do_what_posix_says(a):
    a.ok("claims data /mnt")


@claim(1)
def a_write_that_is_cut_short_leaves_no_blocks_behind_the_end(a):
    a.ok("claims cut_short /mnt")


@claim(1)
def names_links_renames_and_unlinked_files_do_what_posix_says(a):
    a.ok("claims names /mnt")


@claim(1)
def owners_setuid_xattrs_acls_and_flags_are_kept_and_enforced(a):
    a.ok("claims attributes /mnt")


@claim(1)
def rare_calls_of_several_users_give_and_leave_what_they_do_on_tmpfs(a):
    a.ok("mkdir -p /tmp/t; mount -t tmpfs none /tmp/t; mkdir /tmp/t/t")
    # Before 6.6 tmpfs has neither attributes of users nor flags.
    lacks = "zero whiteout" + ("" if tuple(map(int, a.ok("uname -r").split(".")[:2])) >= (6, 6) else " xattr flags")
    try:
        for seed in DIFFER_SEEDS:
            a.ok("mkdir /tmp/t/%d /mnt/%d; differ /tmp/t/%d /mnt/%d %d 4000 %s" % (*[seed] * 5, lacks))
    finally:
        a.run("rm -rf /mnt/*; umount /tmp/t")


@claim(1)
def a_directory_read_while_it_shrinks_shows_every_name_once(a):
    a.ok("claims directory /mnt 3000")


@claim(1)
def a_mapping_shows_writes_grows_shrinks_and_serves_futexes_and_pipes(a):
    a.ok("claims mapped /mnt")


@claim(1)
def pages_of_closed_files_in_pipes_hold_up_nobody_and_are_no_other_files_blocks(a):
    a.ok("touch /mnt/x; rm /mnt/x")
    before = a.ok("df /mnt | tail -1")
    a.ok("rm -f /tmp/stop; claims spliced /mnt /tmp/stop > /tmp/spliced 2>&1 & until test -s /tmp/spliced; do :; done; cat /tmp/spliced")
    for _ in range(2):
        a.ok("dd if=/dev/zero of=/mnt/fill bs=1M count=230 2>/dev/null; rm /mnt/fill; claims touched /mnt 200; echo 2 > /proc/sys/vm/drop_caches")
        # An unused mount can go, and come again, while a pipe has its pages.
        a.ok("umount /mnt; mount -t tombolo test /mnt; test $(ls /mnt | wc -l) = 4")
    rc, out = a.run("timeout -s KILL 1 truncate -s 0 /mnt/s0")
    need(rc == 137, "a truncation did not wait, or not for its end: %d %s" % (rc, out))
    a.ok("truncate -s 4 /mnt/s0 & touch /tmp/stop; wait; test $(cat /mnt/s0) = aaaa")
    a.ok("until test $(wc -l < /tmp/spliced) = 2; do :; done")
    need("shown" in a.ok("cat /tmp/spliced"), a.ok("cat /tmp/spliced"))
    a.ok("rm /mnt/s*")
    # The worker finds the pages idle when it looks next.
    comes_to(a, "df /mnt | tail -1", before)


@claim(1)
def a_truncation_that_waits_for_a_page_in_a_pipe_holds_up_no_directory(a):
    a.ok("rm -f /tmp/stop /tmp/kept; mkdir /mnt/d; " + filled("/mnt/d/k", "64k") % "a")
    a.ok("claims kept /mnt/d/k /tmp/stop > /tmp/kept 2>&1 & until test -s /tmp/kept; do :; done")
    a.ok("truncate -s 0 /mnt/d/k & sleep 1; begin=$(date +%s); rm /mnt/d/k & until ! test -e /mnt/d/k; do :; done; touch /mnt/d/x; "
         "test $(($(date +%s) - begin)) -lt 10; rc=$?; touch /tmp/stop; wait; exit $rc")
    a.ok("grep -x shown /tmp/kept; rm -r /mnt/d")


@claim(1)
def a_removal_that_waits_for_a_page_in_a_pipe_keeps_to_what_the_file_forbids_by_then(a):
    a.ok("claims overtaken /mnt/f")


def files_area(m):
    """Where the file system begins in the zone mapped as m."""
    areas = [struct.unpack_from("<IIQQ", m, 256 + 64 * i) for i in range(32)]
    return next(offset for kind, _, offset, _ in areas if kind == 1)


def inode_table(m):
    """Where the inodes that mkfs makes room for begin in the zone mapped as m (tfs_format.h)."""
    area = files_area(m)
    return area + struct.unpack_from("<Q", m, area + 88)[0] * 4096


def held_by_member_1(m):
    """The word of a lock that the second guest holds."""
    state = struct.unpack_from("<Q", m, 4096 + 256)[0]
    need(state & 0xff == 2, "member 1 is not there: %#x" % state)
    return state >> 32 << 32 | 0x100 | 2


def let_go_by_member_1(m, lock):
    """Frees the lock if the second guest still holds it."""
    if m[lock] == 2:
        struct.pack_into("<Q", m, lock, 0)


def waits(m, lock):
    """Does a member wait for the lock?"""
    return struct.unpack_from("<Q", m, lock + 8)[0]


def removed_but_open(m):
    """Where the locks of inodes without a name lie, of those that mkfs makes room for."""
    inodes = (inode_table(m) + 256 * i for i in range(2, 256))
    return [at + 192 for at in inodes if m[at] == 2 and not struct.unpack_from("<Q", m, at + 24)[0]]


@claim(2)
def a_late_close_that_waits_for_another_members_lock_holds_up_no_open_of_another_file(a, b):
    a.ok("echo text > /mnt/other; rm -f /tmp/stop; claims spliced /mnt /tmp/stop > /tmp/spliced 2>&1 & until test -s /tmp/spliced; do :; done")
    with open(a.rig.zone, "r+b") as f, mmap.mmap(f.fileno(), ZONE_MIB << 20) as m:
        locks = removed_but_open(m)
        need(len(locks) == 4, "%d files are removed and in use" % len(locks))
        # The other guest has the locks that the last close of each of them needs.
        for lock in locks:
            struct.pack_into("<Q", m, lock, held_by_member_1(m))
        try:
            a.ok("touch /tmp/stop; until test $(wc -l < /tmp/spliced) = 2; do :; done; grep -q shown /tmp/spliced")
            end = time.monotonic() + TIMEOUT
            while not any(waits(m, lock) for lock in locks):
                need(time.monotonic() < end, "no close waits for a lock")
            a.ok("test $(cat /mnt/other) = text; echo more > /mnt/new; test $(cat /mnt/new) = more", timeout=60)
            # One of them can be closed now, and not the one that came first.
            other = next((lock for lock in locks if not waits(m, lock)), locks[-1])
            let_go_by_member_1(m, other)
            end = time.monotonic() + TIMEOUT
            while len(removed_but_open(m)) != 3:
                need(time.monotonic() < end, "its close waits for that of another file")
        finally:
            for lock in locks:
                let_go_by_member_1(m, lock)
        end = time.monotonic() + TIMEOUT
        while removed_but_open(m):
            need(time.monotonic() < end, "a removed file is still there")
    a.ok("rm /mnt/s* /mnt/other /mnt/new")


@claim(2)
def a_lock_whose_release_was_killed_while_it_waited_for_a_suspended_member_is_released_later_whatever_others_wait_for(a, b):
    names = ("f", "g")
    for name in names:
        a.ok("rm -f /tmp/go; claims release /mnt/%s /tmp/go > /tmp/held-%s & echo $! > /tmp/pid-%s; until test -s /tmp/held-%s; do :; done" % ((name,) * 4))
    with open(a.rig.zone, "r+b") as f, mmap.mmap(f.fileno(), ZONE_MIB << 20) as m:
        # The other guest has the locks of the files' lock tables (tfs_inode.entries).
        tables = [inode_table(m) + 256 * int(a.ok("stat -c %i /mnt/" + name)) + 112 for name in names]
        for table in tables:
            struct.pack_into("<Q", m, table, held_by_member_1(m))
        try:
            a.ok("touch /tmp/go")
            end = time.monotonic() + TIMEOUT
            while not all(waits(m, table) for table in tables):
                need(time.monotonic() < end, "a release does not wait")
            for name in names:
                a.ok("p=$(cat /tmp/pid-%s); kill -9 $p; while grep -q '^State:.[RSD]' /proc/$p/status; do sleep 1; done" % name)
            # The second one goes on while the first one waits.
            let_go_by_member_1(m, tables[1])
            comes_to(b, "claims free /mnt/g > /dev/null 2>&1 && echo free || echo held", "free")
        finally:
            for table in tables:
                let_go_by_member_1(m, table)
    comes_to(b, "claims free /mnt/f > /dev/null 2>&1 && echo free || echo held", "free")
    a.ok("claims free /mnt/f; claims free /mnt/g; rm /mnt/f /mnt/g")


@claim(2)
def a_mapping_is_read_while_a_truncation_of_its_file_waits_for_a_suspended_member(a, b):
    a.ok("printf text > /mnt/f")
    with open(a.rig.zone, "r+b") as f, mmap.mmap(f.fileno(), ZONE_MIB << 20) as m:
        lock = inode_table(m) + 256 * int(a.ok("stat -c %i /mnt/f")) + 192
        struct.pack_into("<Q", m, lock, held_by_member_1(m))
        try:
            a.ok("truncate -s 2 /mnt/f > /dev/null 2>&1 &")
            end = time.monotonic() + TIMEOUT
            while not waits(m, lock):
                need(time.monotonic() < end, "the truncation does not wait")
            a.ok("claims shown /mnt/f t", timeout=60)
        finally:
            let_go_by_member_1(m, lock)
    comes_to(a, "stat -c %s /mnt/f", "2")
    a.ok("rm /mnt/f")


def swap_xattrs(m, one, other):
    """Exchanges the attributes of two inodes (tfs_inode.xattr_root and blocks)."""
    for word in (56, 80):
        one_has, other_has = struct.unpack_from("<Q", m, one + word), struct.unpack_from("<Q", m, other + word)
        struct.pack_into("<Q", m, one + word, *other_has)
        struct.pack_into("<Q", m, other + word, *one_has)


@claim(2)
def a_chmod_that_waits_while_another_guest_changes_the_acl_keeps_to_that_acl(a, b):
    for before, mode, may in (("claims share /mnt/f 2000", "660", "2001"), ("true", "600", None)):
        a.ok("touch /mnt/f /mnt/g; %s; claims share /mnt/g 2001" % before)
        with open(a.rig.zone, "r+b") as f, mmap.mmap(f.fileno(), ZONE_MIB << 20) as m:
            file, other = (inode_table(m) + 256 * int(a.ok("stat -c %i /mnt/" + name)) for name in "fg")
            struct.pack_into("<Q", m, file + 192, held_by_member_1(m))
            try:
                a.ok("(chmod %s /mnt/f; echo $? > /tmp/ended) > /dev/null 2>&1 &" % mode)
                end = time.monotonic() + TIMEOUT
                while not waits(m, file + 192):
                    need(time.monotonic() < end, "the chmod does not wait")
                # The other guest's setfacl changes these words, too.
                swap_xattrs(m, file, other)
            finally:
                let_go_by_member_1(m, file + 192)
        comes_to(a, "cat /tmp/ended; true", "0")
        for user in ("2000", "2001"):
            need((a.run("claims opens /mnt/f " + user)[0] == 0) == (user == may), "chmod %s gives user %s the wrong right" % (mode, user))
        a.ok("chmod 660 /mnt/f; claims opens /mnt/f 2001; rm /mnt/f /mnt/g /tmp/ended")


@claim(1)
def files_that_are_mapped_and_removed_one_after_the_other_leave_nothing(a):
    a.ok("touch /mnt/x; rm /mnt/x")
    before = a.ok("df /mnt | tail -1")
    a.ok("claims touched /mnt 3000")
    comes_to(a, "df /mnt | tail -1", before)


@claim(1)
def a_reader_of_a_sparse_mapping_fills_nothing_and_sees_what_is_stored_there(a):
    a.ok("claims holes /mnt/h; rm /mnt/h; touch /mnt/sparse; truncate -s 100M /mnt/sparse")
    before = a.ok("df /mnt | tail -1")
    need(a.ok("claims seen /mnt/sparse 104857600; cat /mnt/sparse | wc -c") == "0\n104857600", "zeroes")
    need(a.ok("df /mnt | tail -1") == before, "%s became %s" % (before, a.ok("df /mnt | tail -1")))
    a.ok("rm /mnt/sparse")


@claim(1)
def statistics_of_the_page_cache_of_a_mapped_file_harm_no_kernel(a):
    a.ok("claims cached /mnt/f && rm /mnt/f")


@claim(1)
def a_user_who_maps_a_file_often_leaves_the_other_users_their_open_files(a):
    a.ok("claims many /mnt/f && rm /mnt/f")


@claim(1)
def a_file_that_is_mapped_through_overlayfs_has_the_name_there(a):
    a.ok("mkdir /mnt/lower /tmp/upper /tmp/work /tmp/overlay; head -c 8192 /dev/urandom > /mnt/lower/f")
    a.ok("mount -t overlay -o lowerdir=/mnt/lower,upperdir=/tmp/upper,workdir=/tmp/work overlay /tmp/overlay")
    a.ok("claims overlaid /tmp/overlay/f && umount /tmp/overlay && rm -r /mnt/lower /tmp/upper /tmp/work /tmp/overlay")


@claim(1)
def a_system_call_that_copies_to_a_mapping_which_userfaultfd_watches_ends(a):
    a.ok("timeout -s KILL 60 claims guarded /mnt/f && rm /mnt/f", timeout=120)


@claim(1)
def a_write_into_another_process_private_mapping_changes_no_other_byte_of_its_page(a):
    a.ok("claims poked /mnt/f && rm /mnt/f")


@claim(1)
def what_a_file_took_comes_back_when_it_goes(a):
    a.ok("touch /mnt/x; rm /mnt/x")
    before = a.ok("df /mnt | tail -1")
    a.ok("for i in 1 2 3; do dd if=/dev/zero of=/mnt/x bs=1M count=50 2>/dev/null; rm /mnt/x; done")
    need(a.ok("df /mnt | tail -1") == before, "%s became %s" % (before, a.ok("df /mnt | tail -1")))


@claim(1)
def a_full_zone_says_so_and_loses_nothing(a):
    a.ok("echo kept > /mnt/kept")
    rc, out = a.run("dd if=/dev/zero of=/mnt/full bs=1M count=400")
    need(rc and "No space" in out, "no ENOSPC: " + out)
    a.ok("test $(cat /mnt/kept) = kept && rm /mnt/full && echo fine > /mnt/after && test $(cat /mnt/after) = fine && rm /mnt/after /mnt/kept")


@claim(1)
def a_hole_of_a_full_zone_is_read_as_zeroes_through_any_mapping(a):
    a.ok("touch /mnt/sparse; truncate -s 1M /mnt/sparse; ls /mnt")
    need(a.run("dd if=/dev/zero of=/mnt/full bs=1M count=400; while echo x >> /mnt/full; do :; done")[0] == 0, "the zone is full")
    a.ok("claims sparse /mnt/sparse && test $(cat /mnt/sparse | wc -c) = 1048576")
    a.ok("rm /mnt/full /mnt/sparse")


@claim(1)
def a_program_can_run_from_the_zone_and_from_an_unlinked_file(a):
    a.ok("cp /bin/busybox /mnt/busybox && /mnt/busybox sh -c 'rm /mnt/busybox; exit 0' && test ! -e /mnt/busybox")


@claim(1, mount=False)
def a_mount_that_cannot_be_says_why(a):
    rc, out = a.run("mount -t tombolo nosuch /mnt; dmesg | tail -1")
    need("no such zone" in a.ok("dmesg | tail -2"), out)
    rc, out = a.run("mount -t tombolo -o member=63 test /mnt")
    need(rc and "no slot 63" in a.ok("dmesg | tail -2"), out)
    a.ok("mount -t tombolo /dev/pmem0 /mnt && mount -t tombolo 7a6f6e65-0102-4304-8506-0708090a0b0c /z && echo x > /mnt/x && cat /z/x && umount /z && umount /mnt")


@claim(1, mount=False)
def a_header_that_changes_while_its_zone_is_mounted_is_refused_and_the_zone_can_be_mounted_after(a):
    a.start("for i in $(seq 500); do mount -t tombolo test /mnt 2>/dev/null && umount /mnt; dmesg | grep -q 'cannot attach' && exit; done; exit 1")
    with open(a.rig.zone, "r+b") as f, mmap.mmap(f.fileno(), ZONE_MIB << 20) as m:
        version = struct.unpack_from("<I", m, 8)[0]
        # A mount looks twice: which zone it is, and then at the device that it has for itself. Each look sees one version or the other.
        other = 0
        while not a.ended():
            other ^= 1
            struct.pack_into("<I", m, 8, version + other)
        struct.pack_into("<I", m, 8, version)
    rc, out = a.finish()
    need(rc == 0, "no mount saw two headers: " + out)
    a.ok("mount -t tombolo test /mnt && ls /mnt && umount /mnt")


@claim(1)
def a_guest_hibernates_only_while_it_uses_no_zone(a):
    # The guest has no swap space, so its kernel never writes an image. It begins to make one if no driver refuses the hibernation.
    begun = "dmesg | grep -c 'Preallocating image memory' || true"
    rc, out = a.run("echo disk > /sys/power/state")
    need(rc and "busy" in out and "no hibernation while a zone is in use" in a.ok("dmesg | tail -5"), out)
    need(a.ok(begun) == "0", "an image was begun: " + a.ok("dmesg | tail -5"))
    a.ok("echo x > /mnt/x; umount /mnt")
    rc, out = a.run("echo disk > /sys/power/state")
    need(rc and "busy" not in out and a.ok(begun) == "1", out)
    a.ok("mount -t tombolo test /mnt; test $(cat /mnt/x) = x; rm /mnt/x")


@claim(1)
def a_mount_begins_while_an_earlier_one_of_the_same_zone_ends(a):
    # The last user of a mount that has no place any more ends it; meanwhile the zone is mounted again.
    a.ok("i=0; while test $i -lt 200; do (sleep 0.0$((i % 5)) < /mnt) & umount -l /mnt || exit 1; sleep 0.0$((i % 4)); mount -t tombolo test /mnt || exit 1; "
         "i=$((i+1)); done; wait")


@claim(1)
def a_mount_begins_while_another_one_of_the_same_zone_fails(a):
    a.ok("umount /mnt; mkdir /tmp/other")
    a.ok("i=0; while test $i -lt 100; do (for j in 1 2 3 4 5; do mount -t tombolo -o member=60 test /tmp/other 2>/dev/null && umount /tmp/other; done; true) & "
         "usleep $((i % 50 * 700)); mount -t tombolo -o member=0 test /mnt || exit 1; wait; umount /mnt; i=$((i+1)); done")
    a.ok("mount -t tombolo test /mnt")


@claim(1)
def a_mount_is_made_read_only_and_writable_again_while_it_is_used(a):
    a.ok("echo kept > /mnt/f; mount -o remount,ro /mnt")
    rc, out = a.run("echo x > /mnt/x")
    need(rc and "Read-only" in out, out)
    a.ok("test $(cat /mnt/f) = kept; mount -o remount,rw /mnt; echo x > /mnt/f && rm /mnt/f")
    # The options that /proc/mounts shows, by which these remounts went through, must be those of the mount.
    options = a.ok("sed -n 's/^test [^ ]* tombolo \\([^ ]*\\) .*/\\1/p' /proc/mounts")
    need("member=0,zone=" in options, options)
    for wrong in options.replace("member=0", "member=1"), options[:-1] + "f", options[:-1]:
        need(a.run("mount -i -o remount,%s /mnt" % wrong)[0], "a remount took " + wrong)
    need(a.run("mount -t tombolo -o zone=%s test /z" % ("0" * 8 + "-0000-0000-0000-" + "0" * 12))[0], "a mount took another zone's uuid")


@claim(1, ro=0)
def a_read_only_member_reads_and_cannot_write(a):
    need(", ro" in a.ok("mount | grep tombolo").replace("(ro", ", ro"), "not read-only")
    rc, out = a.run("echo x > /mnt/x")
    need(rc and "Read-only" in out, out)
    rc, out = a.run("mount -o remount,rw /mnt")
    need(rc and "no right to write" in a.ok("dmesg | tail -2"), "remounted for writing")
    a.ok("ls /mnt")


@claim(1)
def a_mount_for_reading_only_stores_nothing_in_the_zone(a):
    a.ok("mkdir /mnt/d; echo kept > /mnt/d/f; chmod 644 /mnt/d/f; dd if=/dev/zero of=/mnt/sparse bs=4k seek=99 count=1 2>/dev/null; umount /mnt")
    before = whole(a.rig.zone)
    a.ok("mount -t tombolo -o ro test /mnt")
    rc, out = a.run("echo x > /mnt/x")
    need(rc and "Read-only" in out, out)
    need(a.ok("cat /mnt/d/f; ls /mnt; claims seen /mnt/sparse 400000") == "kept\nd\nsparse\n0", "what is there")
    need(a.run("mount -o remount,rw /mnt")[0] and "without taking part" in a.ok("dmesg | tail -2"), "it came to write without taking part")
    rc, out = a.run("mount -t tombolo test /z")
    need(rc and "is mounted read-only" in a.ok("dmesg | tail -2"), out)
    need(whole(a.rig.zone) == before, "something was stored")
    a.ok("umount /mnt; mount -t tombolo test /mnt; rm -r /mnt/*")


@claim(1)
def file_locks_exclude_processes_and_find_deadlocks(a):
    a.ok("claims locks /mnt")


@claim(1)
def an_idmapped_mount_shows_and_stores_mapped_owners(a):
    a.ok("idmapped /mnt /z && umount /z && rm -r /mnt/*")


@claim(1, needs="fsx")
def fsx_finds_no_difference(a):
    a.ok("printf 'flen = 1048576\\n[weights]\\nclose_open = 1\\ninvalidate = 1\\ntruncate = 2\\nfsync = 0.2\\nfdatasync = 0.2\\nread = 10\\nwrite = 10\\n"
         "mapread = 6\\nmapwrite = 6\\npunch_hole = 2\\nposix_fallocate = 1\\nsendfile = 1\\nposix_fadvise = 1\\ncopy_file_range = 1\\n' > /tmp/fsx.toml")
    operations = os.environ.get("TOMBOLO_FSX", "20000")
    a.ok("fsx -N %s -S 7 /mnt/fsx && fsx -f /tmp/fsx.toml -N %s -S 3 /mnt/fsx && rm /mnt/fsx*" % (operations, operations), 3600)


@claim(1, needs="pjdfstest")
def pjdfstest_passes_without_exclusions(a):
    users = [("nobody", "nogroup", 65534), ("tests", "tests", 1001), ("pjdfstest", "pjdfstest", 1002)]
    a.ok("printf 'root:x:0:0::/:/bin/sh\\n%s' > /etc/passwd" % "".join("%s:x:%d:%d::/:/bin/sh\\n" % (u, i, i) for u, _, i in users))
    a.ok("printf 'root:x:0:\\n%s' > /etc/group" % "".join("%s:x:%d:\\n" % (g, i) for _, g, i in users))
    a.ok("printf '[features]\\nposix_fallocate={}\\nrename_ctime={}\\nutimensat={}\\nutime_now={}\\n[settings]\\nnaptime=0.02\\nallow_remount=false\\n"
         "[dummy_auth]\\nentries=[%s]\\n' > /tmp/pjdfstest.toml" % ",".join('["%s","%s"]' % (u, g) for u, g, _ in users))
    rc, out = a.run("mkdir /mnt/p; chmod 777 /mnt/p; pjdfstest -c /tmp/pjdfstest.toml -p /mnt/p 2>&1 | grep -E 'FAILED|Summary'", 600)
    need("Summary: 0 failed" in out, out)
    print("      " + out)
    a.ok("rm -r /mnt/p")


# --- several guests --------------------------------------------------------------------------------------------------


@claim(2)
def what_one_guest_did_the_other_sees_at_once(a, b):
    a.ok("echo 1 > /mnt/f")
    need(b.ok("cat /mnt/f") == "1", "contents")
    need("No such" in b.run("cat /mnt/g")[1], "a name that is not there")
    a.ok("mv /mnt/f /mnt/g; chmod 600 /mnt/g; echo longer >> /mnt/g; ln -s g /mnt/s")
    need(b.ok("cat /mnt/s; stat -c %a:%s /mnt/g") == "1\nlonger\n600:9", "rename, mode, size")
    need(b.run("test -e /mnt/f")[0] == 1, "the old name is still there")
    b.ok("rm /mnt/g /mnt/s; mkdir -p /mnt/d/e")
    need(a.run("cat /mnt/g")[0], "a file that is gone")
    a.ok("cd /mnt/d/e; echo x > y; mv /mnt/d /mnt/h")
    need(b.ok("cat /mnt/h/e/y; find /mnt | sort") == "x\n/mnt\n/mnt/h\n/mnt/h/e\n/mnt/h/e/y", "a moved directory")
    b.ok("cd /mnt/h/e; mv /mnt/h/e /mnt/e")
    need(a.ok("cat /mnt/e/y; ls /mnt/h | wc -l") == "x\n0", "a directory moved back")
    a.ok("setfattr -n user.k -v v /mnt/e/y 2>/dev/null; rm -r /mnt/h /mnt/e")
    emptied(a, b)


@claim(2)
def names_that_another_guest_changed_between_own_changes_are_not_believed(a, b):
    a.ok("mkdir /mnt/n && cd /mnt/n && touch gone moved over kept && ls gone moved over kept && ! [ -e late ] && ! [ -e target ]")
    b.ok("cd /mnt/n && rm gone && mv moved target && echo new > other && mv other over && touch late")
    # This guest's own changes come between the other's and its next look.
    a.ok("cd /mnt/n && touch own && mv own own2 && ln own2 own3 && rm own2")
    a.ok("cd /mnt/n && ! [ -e gone ] && ! [ -e moved ] && [ -e late ] && [ -e target ] && [ $(cat over) = new ] && [ -e kept ]")
    for turn in range(8):
        one, two = (a, b) if turn % 2 else (b, a)
        one.ok("cd /mnt/n && touch x%d && mv x%d y%d && ! [ -e x%d ] && [ -e y%d ]" % ((turn,) * 5))
        two.ok("cd /mnt/n && [ -e y%d ] && rm y%d && touch z%d && ! [ -e y%d ]" % ((turn,) * 4))
        one.ok("cd /mnt/n && touch w%d && ! [ -e y%d ] && [ -e z%d ]" % ((turn,) * 3))
    need(a.ok("ls /mnt/n") == b.ok("ls /mnt/n"), "the guests list different names")
    a.ok("rm -r /mnt/n")


@claim(2)
def two_guests_that_append_interleave_whole_writes(a, b):
    both(a, b, "claims append /mnt/log %d 1500")
    a.ok("claims appended /mnt/log 2 1500 && rm /mnt/log")


@claim(2)
def of_two_guests_that_create_a_name_exactly_one_wins(a, b):
    out = both(a, b, "claims barrier /mnt/go 2 %d && claims win /mnt %d 400")
    won = [int(o.split()[-1]) for o in out]
    need(sum(won) == 400, "%s of 400" % won)
    a.ok("rm /mnt/race* /mnt/both* /mnt/go")


@claim(2)
def a_name_that_another_guest_removes_while_it_is_made_is_made_once(a, b):
    for kind in ("open", "mkdir", "mknod", "symlink"):
        b.start("claims make /mnt/x %s 1000" % kind)
        removed = a.ok("claims unmake /mnt/x " + kind)
        rc, out = b.finish()
        need(rc == 0 and removed == "1000", "%s: to be made 1000 times, removed %s times: %s" % (kind, removed, out))


@claim(2)
def a_name_that_another_guest_keeps_making_and_removing_is_opened_or_not_there(a, b):
    for how in "make", "find":
        b.start("claims toggle /mnt/x 1000")
        opened, toggled = a.run("claims reopen /mnt/x %s 5000" % how), b.finish()
        need(opened[0] == toggled[0] == 0, "%s: %s %s" % (how, opened, toggled))


@claim(2)
def a_word_that_two_guests_map_counts_every_increment(a, b):
    a.ok("dd if=/dev/zero of=/mnt/word bs=4k count=1 2>/dev/null")
    both(a, b, "claims barrier /mnt/go 2 %d && claims count /mnt/word 200000")
    need(a.ok("claims count /mnt/word 0") == "400000", "lost increments")
    a.ok("rm /mnt/word /mnt/go")


@claim(2)
def a_mapping_never_shows_blocks_of_another_file(a, b):
    a.ok("dd if=/dev/zero bs=1M count=4 2>/dev/null | tr '\\0' W > /mnt/watched")
    b.start("claims watch /mnt/watched /mnt/stop")
    a.ok("claims cut /mnt 60; touch /mnt/stop")
    rc, out = b.finish()
    need(rc == 0, out)
    a.ok("rm /mnt/watched /mnt/other /mnt/stop")


@claim(2)
def a_mapped_hole_shows_at_once_what_another_guest_stores_there(a, b):
    for how in ("write", "map") * 5:
        a.ok("rm -f /mnt/hole /mnt/ready /mnt/go; touch /mnt/hole; truncate -s 1M /mnt/hole")
        b.start("claims filled /mnt/hole /mnt/ready /mnt/go")
        a.ok("until test -e /mnt/ready; do :; done; claims fill /mnt/hole %s && touch /mnt/go" % how)
        rc, out = b.finish()
        need(rc == 0, "%s: %s" % (how, out))
    a.ok("rm /mnt/hole /mnt/ready /mnt/go")


@claim(2)
def an_open_file_survives_its_removal_by_another_guest(a, b):
    a.ok("printf held > /mnt/h")
    b.start("claims hold /mnt/h /mnt/go")
    a.ok("until test -e /mnt/go.held; do :; done; rm /mnt/go.held")
    a.ok("rm /mnt/h && echo x > /mnt/n && touch /mnt/go")
    rc, out = b.finish()
    need(rc == 0, out)
    a.ok("rm /mnt/n /mnt/go")


@claim(2)
def a_directory_that_one_guest_moved_the_other_moves_on_at_once(a, b):
    a.ok("mkdir -p /mnt/d1/x/in /mnt/d2")
    b.ok("ls -R /mnt/d1 /mnt/d2")
    a.ok("claims move /mnt/d1/x /mnt/d2/y")
    b.ok("claims move /mnt/d2/y /mnt/d1/z")
    a.ok("rmdir /mnt/d1/z/in /mnt/d1/z /mnt/d1 /mnt/d2")


@claim(2)
def what_another_guest_removes_comes_back_though_it_was_open_or_mapped_here(a, b):
    df = "df /mnt | tail -1"
    a.ok("touch /mnt/x; rm /mnt/x")
    before = a.ok(df)
    a.ok("dd if=/dev/zero of=/mnt/word bs=1M count=20 2>/dev/null")
    b.ok("claims count /mnt/word 1")
    a.ok("rm /mnt/word")
    need(a.ok(df) == before, "mapped and closed: %s became %s" % (before, a.ok(df)))
    a.ok("printf held > /mnt/h")
    b.start("claims hold /mnt/h /mnt/go")
    a.ok("until test -e /mnt/go.held; do :; done; rm /mnt/go.held")
    a.ok("rm /mnt/h; touch /mnt/go")
    rc, out = b.finish()
    need(rc == 0, out)
    a.ok("rm /mnt/go")
    need(a.ok(df) == before, "open, then closed: %s became %s" % (before, a.ok(df)))


@claim(2)
def a_page_in_a_pipe_holds_up_removals_from_no_other_file_of_another_guest(a, b):
    df = "df /mnt | tail -1"
    a.ok("touch /mnt/x; rm /mnt/x")
    before = a.ok(df)
    a.ok("rm -f /tmp/stop; claims spliced /mnt /tmp/stop > /tmp/spliced 2>&1 & until test -s /tmp/spliced; do :; done; cat /tmp/spliced")
    a.ok("dd if=/dev/zero bs=4k count=1 2>/dev/null | tr '\\0' p > /mnt/polled; { claims polls /mnt/polled /tmp/stop; echo $?; } > /tmp/polls 2>&1 & until test -s /tmp/polls; do :; done; cat /tmp/polls")
    waits = "dmesg | grep -c 'waiting for member' || true"
    told = int(b.ok(waits))
    # The guest can't let go of it.
    b.ok("truncate -s 0 /mnt/s0")
    for _ in range(6):
        b.ok("dd if=/dev/zero bs=4k count=256 seek=1 conv=notrunc of=/mnt/polled 2>/dev/null; truncate -s 4k /mnt/polled")
    told = int(b.ok(waits)) - told
    need(told <= 2, "the other guest waited %d times" % told)
    a.ok("touch /tmp/stop; until test $(wc -l < /tmp/spliced) = 2 && test $(wc -l < /tmp/polls) = 2; do :; done; grep -q shown /tmp/spliced && grep -qx 0 /tmp/polls")
    a.ok("rm /mnt/polled /mnt/s*")
    comes_to(a, df, before)


def filled(path, size):
    """A command that stores a letter in all of a file, whose blocks are allocated at once, so that those of large ones make huge pages."""
    return "truncate -s 0 %s; fallocate -l %s %s; tr '\\0' %%s < /dev/zero | dd of=%s conv=notrunc bs=%s count=1 iflag=fullblock 2>/dev/null" % (
        path, size, path, path, size)


@claim(2)
def a_page_in_a_pipe_holds_up_no_access_to_what_another_guest_stored_in_its_place(a, b):
    df = "df /mnt | tail -1"
    a.ok("touch /mnt/x; rm /mnt/x")
    before = a.ok(df)
    # The second has huge pages.
    for size in ("64k", "8M"):
        stored = filled("/mnt/k", size)
        a.ok("rm -f /tmp/stop /tmp/kept.*; " + stored % "a")
        # What is in the pipes is another block each time.
        for now, then in ("ab", "bc", "cd"):
            a.ok("claims kept /mnt/k /tmp/stop > /tmp/kept.%s 2>&1 & until test -s /tmp/kept.%s; do :; done; cat /tmp/kept.%s" % (now, now, now))
            b.ok(stored % then)
            a.ok("timeout 60 claims shows /mnt/k " + then)
            b.ok("timeout 60 claims shows /mnt/k " + then)
        a.ok("touch /tmp/stop; until test $(cat /tmp/kept.* | wc -l) = 6; do :; done; ! grep -Lx shown /tmp/kept.* | grep .")
        a.ok("rm /mnt/k")
        comes_to(a, df, before)


@claim(2)
def a_page_in_a_pipe_is_no_other_files_block_though_the_first_page_around_it_changes_too(a, b):
    df = "df /mnt | tail -1"
    a.ok("touch /mnt/x; rm /mnt/x")
    before = a.ok(df)
    a.ok("rm -f /tmp/stop /tmp/kept; " + filled("/mnt/k", "8M") % "a")
    a.ok("claims kept_at /mnt/k 517 /tmp/stop > /tmp/kept 2>&1 & until test -s /tmp/kept; do :; done; cat /tmp/kept")
    # The first change sets the huge page aside, the second one its first small page.
    for page in (515, 512):
        a.ok("claims shows_at /mnt/k %d a" % page)
        b.ok("claims anew /mnt/k %d b" % page)
        a.ok("claims shows_at /mnt/k %d b" % page)
    b.ok("truncate -s 0 /mnt/k")
    b.ok("dd if=/dev/zero bs=1M count=1 2>/dev/null | tr '\\0' x > /tmp/x")
    for _ in range(3):
        b.run("while cat /tmp/x >> /mnt/fill; do :; done")
        b.ok("rm /mnt/fill")
    a.ok("touch /tmp/stop; until test $(cat /tmp/kept | wc -l) = 2; do :; done; cat /tmp/kept; grep -qx shown /tmp/kept")
    a.ok("rm /mnt/k")
    comes_to(a, df, before)


@claim(2)
def what_another_guest_removes_comes_back_though_its_removal_had_failed_here(a, b):
    df = "df /mnt | tail -1"
    a.ok("touch /mnt/x; rm /mnt/x")
    before = a.ok(df)
    a.ok("mkdir -p /mnt/d/in /mnt/e; ls /mnt/d/in")
    for refused in ("rmdir /mnt/d", "claims move /mnt/e /mnt/d"):
        rc, out = a.run(refused)
        need(rc != 0, "`%s` removed a directory with a name in it" % refused)
    b.ok("rm -r /mnt/d /mnt/e")
    need(a.ok(df) == before, "%s became %s" % (before, a.ok(df)))


@claim(2)
def a_storm_of_operations_from_two_guests_leaves_both_in_agreement(a, b):
    a.ok("mkdir /mnt/storm")
    both(a, b, "claims storm /mnt/storm %d 4000")
    listing = "find /mnt/storm -type f -exec md5sum {} \\; | sort; find /mnt/storm | sort | xargs stat -c '%n %s %h %a %i'"
    x, y = a.ok(listing), b.ok(listing)
    need(x == y, "they disagree:\n%s\n---\n%s" % (x, y))
    a.ok("rm -r /mnt/storm")
    emptied(a, b)


def changed_meanwhile(a, b, what, before, after, restore="true"):
    """What `late` does in b once a has changed the mode, owner or flags of a file that b knows; the file's mode and owner then."""
    a.ok("rm -rf /mnt/late && mkdir /mnt/late && chmod 1777 /mnt/late && echo text >/mnt/late/f && cd /mnt/late && %s" % before)
    late = "/mnt/late/f /mnt/late/ready /mnt/late/go"
    b.ok("(claims late %s %s >/late 2>&1; echo $? >>/late) & while [ ! -e /mnt/late/ready ]; do sleep 0.1; done" % (what, late))
    a.ok("cd /mnt/late && %s && touch go" % after)
    comes_to(b, "tail -n 1 /late | grep -x '[0-9]*' || true", "0")
    mode = a.ok("stat -c '%a %u' /mnt/late/f; cd / && " + restore)
    a.ok("rm -r /mnt/late")
    return mode


@claim(2)
def set_id_bits_that_another_guest_took_away_do_not_come_back_with_an_acl(a, b):
    mode = changed_meanwhile(a, b, "acl", "chmod 6755 f", "chmod 0755 f")
    need(mode == "755 0", mode)
    emptied(a, b)


@claim(2)
def a_mode_that_another_guest_has_set_stays_when_an_owner_or_a_size_changes(a, b):
    for what, owner in ("chown", "3000"), ("fchown", "3000"), ("truncate", "0"):
        for before, after, wanted in ("6777", "0606", "606"), ("0606", "6777", "777"):
            mode = changed_meanwhile(a, b, what, "chmod %s f" % before, "chmod %s f" % after)
            need(mode == "%s %s" % (wanted, owner), "%s of %s, which becomes %s: %s" % (what, before, after, mode))
    emptied(a, b)


@claim(2)
def who_owned_a_file_before_another_guest_gave_it_away_has_no_right_to_it_any_more(a, b):
    mode = changed_meanwhile(a, b, "owner", "chown 2000 f", "chown 3000 f && chmod 0600 f")
    need(mode == "600 3000", mode)
    emptied(a, b)


@claim(2)
def a_right_counts_when_the_change_is_made_and_not_when_it_began_to_wait_for_another_guests(a, b):
    with open(a.rig.zone, "r+b") as f, mmap.mmap(f.fileno(), ZONE_MIB << 20) as m:
        for what, acl, at, becomes in (("chmod", False, 16, 0), ("chmod", True, 16, 0), ("acl", False, 16, 0), ("times", False, 16, 0), ("flags", False, 32, 16)):
            a.ok("echo text > /mnt/f; chmod 700 /mnt/f; chown 2000:2000 /mnt/f; rm -f /tmp/mine")
            if acl:
                a.ok("claims mine give-acl /mnt/f")
            mode = a.ok("stat -c %a /mnt/f")
            inode = inode_table(m) + 256 * int(a.ok("stat -c %i /mnt/f"))
            lock = inode + 192
            struct.pack_into("<Q", m, lock, held_by_member_1(m))
            try:
                a.ok("(claims mine %s /mnt/f >/tmp/mine 2>&1; echo $? >>/tmp/mine) > /dev/null 2>&1 &" % what)
                end = time.monotonic() + TIMEOUT
                while not waits(m, lock):
                    need(time.monotonic() < end, "%s does not wait" % what)
                # As a chown to root or a chattr +i by the other guest stores it: the field, and the inode's version.
                for field, value in (at, becomes), (160, struct.unpack_from("<Q", m, inode + 160)[0] + 1):
                    struct.pack_into("<Q", m, inode + field, value)
            finally:
                let_go_by_member_1(m, lock)
            comes_to(a, "tail -n 1 /tmp/mine | grep -x '[0-9]*' || true", "0")
            left = a.ok("stat -c '%a %u' /mnt/f")
            need(left == "%s %d" % (mode, 2000 if at == 32 else 0), "%s: %s" % (what, left))
            need(struct.unpack_from("<Q", m, inode + at)[0] == becomes, "%s: undone" % what)
            a.ok("claims chattr /mnt/f 0; rm /mnt/f")


@claim(2)
def what_another_guest_made_immutable_changes_through_no_descriptor_that_was_open(a, b):
    for what in "fallocate", "xattr", "acl", "write":
        mode = changed_meanwhile(a, b, "fixed-" + what, "chmod 0644 f", "claims chattr f 16", "claims chattr /mnt/late/f 0")
        need(mode == "644 0", "%s: %s" % (what, mode))
    emptied(a, b)


@claim(2, smp=4)
def appends_of_two_guests_stay_whole_while_both_look_at_the_file(a, b):
    a.ok("touch /mnt/log")
    both(a, b, "rm -f /tmp/stop; for i in 1 2; do claims look /mnt/log /tmp/stop & done; claims append /mnt/log %d " + os.environ.get("TOMBOLO_APPENDS", "1500") + "; touch /tmp/stop; wait")
    a.ok("claims appended /mnt/log 2 " + os.environ.get("TOMBOLO_APPENDS", "1500") + " && rm /mnt/log")


@claim(2)
def flock_and_fcntl_exclude_across_guests(a, b):
    for kind in ("flock", "fcntl"):
        out = both(a, b, "claims barrier /mnt/go 2 %d && claims tally /mnt/tally 150 " + kind)
        need(max(int(o.split()[-1]) for o in out) == 300, "%s: %s" % (kind, out))
        a.ok("rm /mnt/tally /mnt/go")


@claim(2)
def inotify_in_one_guest_sees_what_another_does(a, b):
    a.ok("mkdir -p /mnt/d/sub; echo x > /mnt/d/file; echo x > /mnt/d/old; echo x > /mnt/d/over")
    b.start("hear /mnt/d /mnt/d/file /mnt/ready")
    a.ok("for i in $(seq 600); do test -e /mnt/ready && break; sleep 0.1; done; test -e /mnt/ready")
    a.ok("echo y > /mnt/d/new; ln /mnt/d/new /mnt/d/link; mkdir /mnt/d/made; mv /mnt/d/old /mnt/d/moved; mv /mnt/d/moved /mnt/d/over; "
         "chmod 600 /mnt/d/file; echo z >> /mnt/d/file; mv /mnt/d/file /mnt/d/sub/file; rm /mnt/d/link; rmdir /mnt/d/made; rm /mnt/d/sub/file; "
         "touch /mnt/d/end")
    rc, out = b.finish()
    need(rc == 0, out)
    heard = out.splitlines()
    for told in ("dir CREATE new", "dir MODIFY new", "dir CLOSE_WRITE new", "dir CREATE link", "dir CREATE ISDIR made", "dir MOVED_FROM 0 old",
                 "dir MOVED_TO 0 moved", "dir MOVED_FROM 1 moved", "dir MOVED_TO 1 over", "dir ATTRIB file", "file ATTRIB -", "dir MODIFY file",
                 "file MODIFY -", "file CLOSE_WRITE -", "dir MOVED_FROM 2 file", "file MOVE_SELF -", "dir DELETE link", "dir DELETE ISDIR made",
                 "file DELETE_SELF -"):
        need(told in heard, "not heard: %s; but:\n%s" % (told, out))
    need(len(heard) < 40, "told too often:\n" + out)
    a.ok("rm -r /mnt/d /mnt/ready")


@claim(2)
def fanotify_with_file_identifiers_hears_another_guest(a, b):
    a.ok("mkdir /mnt/d")
    b.start("claims fan /mnt/d /mnt/ready || echo failed; touch /mnt/over")
    a.ok("for i in $(seq 600); do test -e /mnt/ready || test -e /mnt/over && break; sleep 0.1; done; touch /mnt/d/made")
    rc, out = b.finish()
    need(rc == 0 and out.strip() == "made", out)
    a.ok("rm -r /mnt/d /mnt/over /mnt/ready")


@claim(2)
def fanotify_of_the_whole_file_system_hears_another_guest(a, b):
    a.ok("mkdir -p /mnt/d/below")
    b.start("claims fan_all /mnt /mnt/ready || echo failed; touch /mnt/over")
    a.ok("for i in $(seq 600); do test -e /mnt/ready || test -e /mnt/over && break; sleep 0.1; done; mkdir /mnt/d/below/made")
    rc, out = b.finish()
    need(rc == 0 and out.strip() == "made", out)
    a.ok("rm -r /mnt/d /mnt/over /mnt/ready")


@claim(2)
def a_file_handle_names_the_same_file_for_each_member_until_the_file_is_removed(a, b):
    a.ok("mkdir -p /mnt/d/e; echo one > /mnt/d/e/f")
    f, d = a.ok("handles of /mnt/d/e/f"), a.ok("handles of /mnt/d/e")
    need(b.ok("handles of /mnt/d/e/f") == f, "another member has another handle")
    a.ok("mv /mnt/d/e /mnt/moved; mv /mnt/moved/f /mnt/moved/g")
    for guest in (a, b):
        guest.ok("echo 2 > /proc/sys/vm/drop_caches")
        need(guest.ok("handles open /mnt " + d).split() == ["/mnt/moved"], "the directory isn't found")
        need(guest.ok("handles open /mnt " + f).split()[-1] == "one", "the file isn't found")
        need(guest.ok("cat /mnt/moved/g >/dev/null; handles open /mnt " + f) == "/mnt/moved/g one", "its path isn't known")
    # What takes the numbers afterwards is not what the handles name.
    b.ok("rm -r /mnt/d /mnt/moved; for i in $(seq 50); do echo two > /mnt/$i; done")
    for guest in (a, b):
        need(guest.ok("handles open /mnt " + f) == "ESTALE" and guest.ok("handles open /mnt " + d) == "ESTALE", "a removed file is found")
        guest.ok("handles forge /mnt")
    a.ok("rm -r /mnt/*")


@claim(1)
def overlayfs_has_an_index_over_the_file_system_and_finds_handles_there(a):
    """Lower and upper layers lie in the zone, or the upper one alone."""
    for lower in ("/mnt/lower", "/tmp/lower"):
        for index in ("off", "on"):
            layers = "-o index=%s,nfs_export=%s,lowerdir=%s,upperdir=/mnt/upper,workdir=/mnt/work none /tmp/o" % (index, index, lower)
            a.ok("mkdir -p %s /mnt/upper /mnt/work /tmp/o; echo below > %s/f; ln %s/f %s/g; mount -t overlay %s" % (lower, lower, lower, lower, layers))
            a.ok("echo above >> /tmp/o/f; grep -q above /tmp/o/f")
            if index == "on": # both names stay one file when it is copied up
                a.ok("cmp /tmp/o/f /tmp/o/g")
                f = a.ok("handles of /tmp/o/g")
                a.ok("umount /tmp/o; mount -t overlay " + layers)
                need(a.ok("handles open /tmp/o " + f).split()[-1] == "below", "not found by its handle")
            a.ok("umount /tmp/o; rm -rf /tmp/o %s /mnt/*" % lower)


@claim(1)
def fiemap_and_statx_say_where_data_lies_and_how_it_may_be_read(a):
    a.ok("truncate -s 1G /mnt/f; for at in 0 1 2 100 262143; do dd if=/dev/zero of=/mnt/f bs=4096 count=1 seek=$at conv=notrunc 2>/dev/null; done")
    out = a.ok("handles extents /mnt/f").split()
    blocks = sum(int(e.split("+")[1]) for e in out if "+" in e)
    need(blocks == 5 and "100+1" in out and out[-5:] == ["262143+1", "last", "align", "1", "1"], out)
    a.ok(": > /mnt/f")
    need(a.ok("handles extents /mnt/f") == "align 1 1", "an empty file has extents")
    a.ok("rm /mnt/f")


@claim(2)
def a_watcher_that_falls_behind_is_told_to_look(a, b):
    a.ok("mkdir /mnt/d; touch /mnt/d/file")
    b.start("hear /mnt/d /mnt/d/file /mnt/ready && touch /mnt/heard")
    a.ok("for i in $(seq 600); do test -e /mnt/ready && break; sleep 0.1; done; test -e /mnt/ready")
    # The name itself may be among what was lost.
    a.ok("claims meta /mnt/d 4000; for i in $(seq 600); do touch /mnt/d/end; test -e /mnt/heard && break; rm /mnt/d/end; sleep 0.1; done; "
         "test -e /mnt/heard")
    rc, out = b.finish()
    need(rc == 0, out)
    behind = "faster than they were heard" in b.ok("dmesg")
    need(not behind or "dir ATTRIB ISDIR -" in out, out[-500:])
    a.ok("rm -r /mnt/d /mnt/ready /mnt/heard")


@claim(2, grant=1)
def a_member_stays_in_its_directory_and_within_its_limits(a, b):
    a.ok("echo secret > /mnt/outside; echo x > /mnt/sub/given")
    need(b.ok("ls -A /mnt; cat /mnt/given; stat -c %i /mnt/. /mnt/..").split()[:2] == ["given", "x"], b.ok("ls -Al /mnt"))
    need(b.run("cat /mnt/../outside || cat /mnt/outside")[0], "it left its directory")
    need("10240" in b.ok("df -k /mnt | tail -1"), b.ok("df -k /mnt"))
    rc, out = b.run("dd if=/dev/zero of=/mnt/big bs=1M count=11")
    need(rc and "quota exceeded" in out, out)
    size = int(a.ok("stat -c %s /mnt/sub/big"))
    need(8 << 20 < size <= 10 << 20, size)
    b.ok("rm /mnt/big; for i in $(seq 20); do echo x > /mnt/f$i || break; done")
    rc, out = b.run("echo x > /mnt/one-more")
    need(rc and "quota exceeded" in out, out)
    a.ok("rm /mnt/sub/f1; dd if=/dev/zero of=/mnt/large bs=1M count=20 2>/dev/null")
    b.ok("echo x > /mnt/one-more")
    a.ok("rm -r /mnt/sub/* /mnt/large /mnt/outside")


@claim(2, dies=1)
def a_guest_that_dies_under_load_leaves_its_locks_and_all_names_to_the_others(a, b):
    a.ok("mkdir /mnt/storm; echo x > /mnt/l")
    b.ok("claims locked /mnt/l 0 & sleep 1; claims storm /mnt/storm 5 500")
    need(a.run("timeout 2 claims locked /mnt/l 1500")[0], "the lock was free while its holder lived")
    b.start("claims storm /mnt/storm 1 1000000")
    a.start("claims storm /mnt/storm 0 6000")
    time.sleep(1)
    b.kill()
    declare_dead(a.rig, 1)
    rc, out = a.finish()
    need(rc == 0, out)
    a.ok("claims locked /mnt/l 2000")
    a.ok("rm -r /mnt/storm /mnt/l")
    emptied(a)


@claim(2, dies=1)
def a_guest_that_lives_on_after_it_was_declared_dead_lets_go_of_its_mappings(a, b):
    a.ok("dd if=/dev/zero bs=4k count=1 2>/dev/null | tr '\\0' p > /mnt/polled")
    b.ok("claims polls /mnt/polled /tmp/stop > /tmp/polls 2>&1 & until test -s /tmp/polls; do :; done; cat /tmp/polls")
    declare_dead(a.rig, 1)
    comes_to(b, "tail -n 1 /tmp/polls", "gone")
    need(b.run("claims shown /mnt/polled p")[0], "it mapped the file again")
    a.ok("rm /mnt/polled")


@claim(1)
def a_driver_that_is_unbound_from_the_memory_of_a_mounted_zone_waits_for_the_umount(a):
    for driver, devices in (("/sys/bus/nd/drivers/nd_pmem", "namespace*"), ("/sys/bus/virtio/drivers/virtio_pmem", "virtio*")):
        a.ok("echo text > /mnt/x; rm -f /tmp/unbound; cd %s; ls -d %s > /tmp/device" % (driver, devices))
        a.ok("(cat /tmp/device > %s/unbind; echo yes > /tmp/unbound) > /dev/null 2>&1 &" % driver)
        a.ok("while test -e /dev/pmem0; do :; done; test $(cat /mnt/x) = text; echo more > /mnt/y; ! test -e /tmp/unbound; umount /mnt")
        comes_to(a, "cat /tmp/unbound; true", "yes")
        a.ok("cat /tmp/device > %s/bind; until test -e /dev/pmem0; do :; done; mount -t tombolo test /mnt" % driver)
        a.ok("test $(cat /mnt/y) = more; rm /mnt/x /mnt/y")


@claim(1)
def a_suspended_snapshot_holds_up_a_program_that_only_reads_its_mapping_for_no_longer_than_one_that_writes(a):
    a.ok("dd if=/dev/zero bs=4k count=1 2>/dev/null | tr '\\0' p > /mnt/shown")
    with open(a.rig.zone, "r+b") as f, mmap.mmap(f.fileno(), ZONE_MIB << 20) as m:
        slot, frozen = 4096 + 256 * 5, files_area(m) + 320
        was, = struct.unpack_from("<Q", m, slot)
        epoch = (was >> 32) + 1
        struct.pack_into("<Q", m, slot, epoch << 32 | 2)
        struct.pack_into("<Q", m, frozen, epoch << 32 | 2 << 8 | 5 + 1)
        try:
            rc, out = a.run("timeout -s KILL 150 claims shown /mnt/shown p")
            need(rc == 0, "no page is shown: %d %s" % (rc, out))
            need(struct.unpack_from("<Q", m, frozen) == (0,), "a page was shown during the freeze")
        finally:
            struct.pack_into("<Q", m, frozen, 0)
            struct.pack_into("<Q", m, slot, was)
    a.ok("rm /mnt/shown")


@claim(1, dies=0)
def a_guest_whose_zone_is_overwritten_while_it_works_neither_crashes_nor_hangs(a):
    a.ok("mkdir /mnt/storm; claims storm /mnt/storm 9 3000; dd if=/dev/zero of=/mnt/big bs=1M count=20 2>/dev/null")
    rng = random.Random(int(os.environ.get("TOMBOLO_SEED", "1")))
    populate(a)
    files = 2 << 20
    with open(a.rig.zone, "r+b") as f, mmap.mmap(f.fileno(), ZONE_MIB << 20) as m:
        # where something is: that's where a wild word does harm
        used = [o for o in range(files, ZONE_MIB << 20, 4096) if m[o:o + 4096].count(0) < 4096]
        for _ in range(int(os.environ.get("TOMBOLO_ROUNDS", "4"))):
            a.start("timeout -s KILL 20 claims storm /mnt/storm %d 3000; timeout -s KILL 20 claims data /mnt; timeout -s KILL 20 claims mapped /mnt; "
                    "timeout -s KILL 20 find /mnt | head -1000 | tail -1; df /mnt >/dev/null; true" % rng.randrange(1000))
            # Words anywhere, then words that mean something, back and forth while they are used.
            for _ in range(200):
                at = rng.choice(used) + 8 * rng.randrange(512)
                old = struct.unpack_from("<Q", m, at)[0]
                new = rng.choice([0, rng.getrandbits(64), old ^ 1 << rng.randrange(64), old + 1, old - 1, 2**64 - 1, rng.getrandbits(16),
                                  rng.getrandbits(16) | 1 << 63, 1 << 48 | rng.getrandbits(16), 4 << 48 | rng.getrandbits(16)])
                struct.pack_into("<Q", m, at, new & (2**64 - 1))
                if rng.random() < 0.1:
                    time.sleep(0.001)
            damage(a.rig, "live", a.rig.zone, rng.randrange(1 << 30), 600)
            a.finish(400)
            a.start("timeout -s KILL 60 abuse /mnt %d 1000 >/dev/null; true" % rng.randrange(1000))
            damage(a.rig, "live", a.rig.zone, rng.randrange(1 << 30), 600)
            a.finish(400)
    a.ok("rm -rf /mnt/* & sleep 10; kill $! 2>/dev/null; true", 200)
    a.run("umount /mnt", 200)
    a.damaged = True


def damage(rig, *args):
    return subprocess.run([rig.work + "/damage", *map(str, args)], capture_output=True, text=True, check=True).stdout


def populate(a):
    a.ok("mkdir -p /mnt/d/e /mnt/many; for i in $(seq 150); do echo $i > /mnt/many/a-name-of-more-than-one-granule-so-that-an-index-comes-$i; done; "
         "dd if=/dev/zero of=/mnt/big bs=1M count=6 2>/dev/null; dd if=/dev/zero of=/mnt/d/sparse bs=4k seek=300000 count=3 2>/dev/null; "
         "for i in 1 5 9 13; do dd if=/dev/zero of=/mnt/d/holes bs=4k seek=$i count=1 conv=notrunc 2>/dev/null; done; ln -s d/e /mnt/link; ln /mnt/big /mnt/d/again; "
         "mkfifo /mnt/pipe; abuse /mnt/d 1 300")


@claim(1, mount=False, dies=0)
def images_that_were_overwritten_are_mounted_and_used_without_a_complaint(a):
    a.ok("mount -t tombolo test /mnt")
    populate(a)
    a.ok("umount /mnt")
    base, seed, images = a.rig.work + "/base", int(os.environ.get("TOMBOLO_SEED", "1")), int(os.environ.get("TOMBOLO_ROUNDS", "30"))
    subprocess.run(["cp", "--sparse=always", a.rig.zone, base], check=True)
    mounted, errors = 0, ""
    for i in range(images):
        did = damage(a.rig, "images", a.rig.zone, base, seed * 1000003 + i, 1 + i % 12)
        try:
            rc, out = a.run("mount -t tombolo test /mnt && { timeout -s KILL 60 abuse /mnt %d 150; umount /mnt; }" % i, 400)
        except Failed as e:
            raise Failed("image %d: %s\nits damage:\n%s" % (i, e, did))
        mounted += "mount:" not in out
        errors += out
        bad = a.complaints()
        need(not bad, "image %d: the kernel complained: %s\nits damage:\n%s" % (i, bad[:3], did))
    # Else it proves little.
    need(mounted > images // 2 and "EUCLEAN" in errors and "is damaged" in a.ok("dmesg"), "only %d of %d were mounted: %s" % (mounted, images, errors[-300:]))
    a.damaged = True


class HostMount:
    """The zone mounted on the host by FUSE. The first one, made before any guest mounts, owns the zone."""

    def __init__(self, rig, name):
        self.rig, self.path = rig, rig.work + "/" + name
        os.makedirs(self.path, exist_ok=True)
        program = [cargo_program("tombolo-files-torture")]
        made = subprocess.run([*program, "files", "mount", "--json", "--member", name, rig.zone, self.path], cwd=ROOT, capture_output=True, text=True)
        need(made.returncode == 0, "mounting on the host: " + made.stderr)
        self.pid = json.loads(made.stdout)["pid"]
        with open(rig.zone, "rb") as f:
            table = f.read(4096 + 64 * 256)[4096:]
        self.member = next(i for i in range(64) if table[i * 256 + 24:].split(b"\0")[0] == name.encode())

    def die(self):
        os.kill(self.pid, signal.SIGKILL)
        declare_dead(self.rig, self.member)
        self.unmount()

    def unmount(self):
        subprocess.run(["umount", "-l", self.path], check=True)


def on_host(rig, *args):
    return subprocess.Popen([rig.work + "/claims", *args], stdout=subprocess.PIPE, text=True)


@claim(1, mount=False, dies=0)
def locks_exclude_between_a_host_mount_and_a_guest_and_go_with_the_death_of_either(a):
    stays, dies = HostMount(a.rig, "stays"), HostMount(a.rig, "dies")
    try:
        a.ok("mount -t tombolo -o member=0 test /mnt")
        for kind in ("flock", "fcntl", "ofd"):
            a.start("claims tally /mnt/tally 100 " + kind)
            host = on_host(a.rig, "tally", stays.path + "/tally", "100", kind)
            out, (rc, text) = host.communicate(timeout=300)[0], a.finish(300)
            need(rc == 0 and host.returncode == 0 and max(int(out), int(text)) == 200, "%s: %s and %s" % (kind, out, text))
            a.ok("rm /mnt/tally")
        holder = on_host(a.rig, "locked", dies.path + "/l", "0")
        need("ms" in holder.stdout.readline(), "no lock on the host")
        need(a.run("timeout 1 claims locked /mnt/l 60000")[0], "the guest got what the host has")
        a.start("claims locked /mnt/l 60000")
        dies.die()
        rc, out = a.finish()
        need(rc == 0, "after the mount's death: " + out)
        holder.kill()
        a.start("claims locked /mnt/k 0")
        while on_host(a.rig, "free", stays.path + "/k").wait() == 0:
            need(a.process.poll() is None, "the guest is gone")
        waiter = on_host(a.rig, "locked", stays.path + "/k", "60000")
        a.kill()
        declare_dead(a.rig, 0)
        need(waiter.wait(300) == 0, "after the guest's death: %s" % waiter.stdout.read())
    finally:
        for mount in (stays, dies):
            if os.path.ismount(mount.path):
                mount.unmount()


@claim(1, mount=False, dies=0)
def a_guest_without_the_module_mounts_the_zone_by_fuse_from_an_ivshmem_device(a):
    from members import torture
    program = torture(a.rig.work)[1]
    b = a.rig.without_module([program]).boot("plain", a.rig.zone, ZONE_MIB, extra=[
        "-object", "memory-backend-file,id=bar,mem-path=%s,size=%dM,share=on" % (a.rig.zone, ZONE_MIB), "-device", "ivshmem-plain,memdev=bar"])
    try:
        mount = "tombolo-files-torture files mount --json --member vm5 pci:test /mnt > /tmp/mount"
        a.ok("mount -t tombolo test /mnt && echo here > /mnt/x")
        b.ok("! test -e /sys/module/tombolo && %s && test $(cat /mnt/x) = here" % mount)
        both(a, b, "claims append /mnt/log %d 200")
        a.ok("claims appended /mnt/log 2 200")
        b.ok("claims locked /mnt/l 0 > /tmp/held & until test -s /tmp/held; do :; done; echo there > /mnt/x")
        a.ok("test $(cat /mnt/x) = there")
        # The locks of the mount's process end with it, though its VM lives; and the VM can mount again.
        a.start("claims locked /mnt/l 60000")
        b.ok("kill -9 $(sed 's/.*\"pid\":\\([0-9]*\\).*/\\1/' /tmp/mount) && umount -l /mnt && killall claims")
        rc, out = a.finish()
        need(rc == 0, "after the mount's death: " + out)
        b.ok("%s && test $(cat /mnt/x) = there && umount /mnt" % mount)
        a.ok("umount /mnt")
        need(not b.complaints(), "the kernel complained: %s" % b.complaints())
    finally:
        b.off()


def lent_zone(a, member, folder):
    """The guest as a host: mounts the zone in a file of tmpfs by a descriptor of that file."""
    a.ok("mkdir -p %s && mount -t tombolo -o memory=9,member=%d host %s 9<>/tmp/z/zone" % (folder, member, folder))


@claim(1, mount=False, dies=0)
def a_host_mounts_a_zone_by_a_descriptor_of_its_memory_beside_another_member(a):
    from members import torture
    program = torture(a.rig.work)[1]
    b = a.rig.host([program]).boot("host", a.rig.zone, ZONE_MIB, memory=512)
    try:
        b.ok("mkdir -p /tmp/z /tmp/fuse && mount -t tmpfs none /tmp/z && mkzone /tmp/z/zone 96 2")
        for refused in ("-o memory=9 host /mnt 9</tmp/z/zone", "-o memory=9 host /mnt 9<>/bin/claims", "-o memory=77 host /mnt"):
            need(b.run("mount -t tombolo %s" % refused)[0], "mounted: " + refused)
        lent_zone(b, 0, "/tmp/host")
        for promise in ("data", "names", "attributes", "lent", "holes"):
            b.ok("claims %s /tmp/host%s" % (promise, "/h" if promise == "holes" else ""))
        b.ok("claims directory /tmp/host 500")
        b.ok("cp /bin/claims /tmp/host/program && /tmp/host/program cut_short /tmp/host && rm -rf /tmp/host/*")
        # A second mount is the same one; a cut of the memory's file leaves what is mounted whole.
        lent_zone(b, 0, "/tmp/again")
        b.ok("echo here > /tmp/host/x && test $(cat /tmp/again/x) = here && umount /tmp/again")
        b.ok("tombolo-files-torture files mount --json --member host /tmp/z/zone /tmp/fuse > /tmp/mount")
        b.ok("test $(cat /tmp/fuse/x) = here && echo there > /tmp/fuse/x && test $(cat /tmp/host/x) = there")
        b.ok("(claims append /tmp/host/log 0 200 & claims append /tmp/fuse/log 1 200 & wait) && claims appended /tmp/host/log 2 200")
        b.ok("claims locked /tmp/fuse/l 0 > /tmp/held & until test -s /tmp/held; do :; done; ! claims free /tmp/host/l && killall claims")
        b.ok("umount /tmp/fuse && truncate -s 0 /tmp/z/zone && test $(cat /tmp/host/x) = there && echo on > /tmp/host/y && umount /tmp/host")
        need(not b.complaints(), "the kernel complained: %s" % b.complaints())
    finally:
        b.off()


@claim(1, mount=False, dies=0)
def files_mount_uses_the_kernel_of_a_host_which_holds_the_slot_until_the_last_unmount(a):
    from members import torture
    b = a.rig.host([torture(a.rig.work)[1]]).boot("host", a.rig.zone, ZONE_MIB, memory=512)
    files = "tombolo-files-torture files "
    mount, remake = files + "mount --json %s /tmp/z/zone /tmp/%s", files + "mkfs --force /tmp/z/zone"
    pid = "$(sed 's/.*\"pid\":\\([0-9]*\\).*/\\1/' /tmp/said)"
    ended = "until ! kill -0 %s 2>/dev/null; do :; done" % pid

    def refused(command, why):
        rc, out = b.run(command + " 2>&1")
        need(rc and why in out, "`%s` gave %d: %s" % (command, rc, out))

    try:
        b.ok("mkdir -p /tmp/z /tmp/host /tmp/fuse && mount -t tmpfs none /tmp/z && mkzone /tmp/z/zone 96 2")
        b.ok(mount % ("--member me", "host") + " > /tmp/said && grep '\"kernel\"' /tmp/said && grep ' /tmp/host tombolo rw,nosuid,nodev,' /proc/mounts")
        b.ok("claims lent /tmp/host && echo here > /tmp/host/x")
        refused(mount % ("--backend kernel", "fuse"), "has it mounted at /tmp/host")
        b.ok(mount % ("", "fuse") + " | grep '\"fuse\".*mounted at /tmp/host' && test $(cat /tmp/fuse/x) = here && umount /tmp/fuse")
        # Another name for it, and no process any more: the kernel holds the slot.
        b.ok("mount --bind /tmp/host /tmp/fuse && kill -9 %s && %s" % (pid, ended))
        b.ok("echo on > /tmp/host/x && umount /tmp/host && test $(cat /tmp/fuse/x) = on")
        refused(remake, "in use by me")
        refused(mount % ("--backend fuse --member me", "host"), "me: is in the zone already")
        b.ok("umount /tmp/fuse && " + remake)
        # SIGTERM unmounts; an unmount ends the process, and the name is free.
        for end in ("kill %s && " % pid, "umount /tmp/host && "):
            b.ok(mount % ("--member me --backend kernel", "host") + " > /tmp/said && " + end + ended + " && ! grep tombolo /proc/mounts && ! pidof tombolo-files-torture")
        b.ok(mount % ("--read-only", "host") + " > /tmp/said && grep '\"kernel\"' /tmp/said && ! touch /tmp/host/y && umount /tmp/host && " + ended)
        b.ok("cp /tmp/z/zone /tmp/zone && mkdir /tmp/inner && " + files + "mkfs --size 8M /tmp/plain")
        refused(files + "mount --backend kernel /tmp/plain /tmp/host", "outside of a zone")
        refused("unshare -Urm " + mount % ("--backend kernel", "host"), "CAP_SYS_ADMIN")
        need("damaged" not in b.ok("dmesg") and not b.complaints(), "the kernel complained: %s" % b.complaints())
    finally:
        b.off()


@claim(1, mount=False, dies=0)
def a_kernel_mount_of_a_host_rings_other_members_and_is_rung(a):
    from members import torture
    b = a.rig.host([torture(a.rig.work)[1]]).boot("host", a.rig.zone, ZONE_MIB, memory=512)
    mount = "tombolo-files-torture files mount --json %s /tmp/z/zone /tmp/%s > /tmp/said && grep '\"%s\"' /tmp/said"

    def waits_for_the_lock_of_a_fuse_mount(then):
        b.ok(mount % ("--backend kernel", "host", "kernel") + " && " + mount % ("--backend fuse", "fuse", "fuse"))
        b.ok("rm -f /tmp/go && (claims release /tmp/fuse/l /tmp/go > /tmp/held &) && until test -s /tmp/held; do :; done")
        b.ok("claims locked /tmp/host/l 600000 > /tmp/got & until grep -q tmb_take /proc/$!/wchan; do :; done; touch /tmp/go && wait && test -s /tmp/got")
        # With nothing mapped and nothing watched this kernel looks at its pending bits only when it is rung.
        member = int(b.ok("sed -n 's/.* tombolo .*member=\\([0-9]*\\).*/\\1/p' /proc/mounts"))
        pending = "dd if=/tmp/z/zone bs=8 skip=%d count=1 2>/dev/null | tr -d '\\000' | wc -c" % ((4096 + member * 256 + 64) // 8)
        b.ok(then % ("test $(%s) = 0" % pending))

    try:
        b.ok("mkdir -p /tmp/z /tmp/host /tmp/fuse && mount -t tmpfs none /tmp/z && mkzone /tmp/z/zone 96 2")
        waits_for_the_lock_of_a_fuse_mount("! %s")
        b.ok("umount /tmp/fuse && umount /tmp/host && while pidof tombolo-files-torture; do :; done")
        b.ok("(tombolo-files-torture serve /tmp/z/zone > /tmp/serving &) && until grep serving /tmp/serving; do :; done")
        waits_for_the_lock_of_a_fuse_mount("until %s; do :; done")
        # A listener that is stopped keeps the count of its rings.
        b.ok("tombolo-files-torture files watch /tmp/z/zone > /tmp/heard 2>&1 & echo $! > /tmp/pid")
        b.ok("until touch /tmp/host/first && grep first /tmp/heard; do :; done")
        rings = "grep -h eventfd-count /proc/$(cat /tmp/pid)/fdinfo/* | grep -vq ' 0$'"
        b.ok("while %s; do :; done; kill -STOP $(cat /tmp/pid) && ! %s && touch /tmp/host/second && until %s; do :; done" % (rings, rings, rings))
        b.ok("kill -CONT $(cat /tmp/pid) && until grep second /tmp/heard; do :; done; kill $(cat /tmp/pid)")
        b.ok("umount /tmp/fuse && umount /tmp/host")
        need("damaged" not in b.ok("dmesg") and not b.complaints(), "the kernel complained: %s" % b.complaints())
    finally:
        b.off()


# The kernel of a guest with one CPU online patches its LOCK prefixes away, which is the harder case.
@claim(2, smp=1)
def one_cpu_guests_lose_no_update_either(a, b):
    both(a, b, "claims append /mnt/log %d 700")
    a.ok("claims appended /mnt/log 2 700 && rm /mnt/log")
    a.ok("mkdir /mnt/storm")
    both(a, b, "claims storm /mnt/storm %d 2000")
    a.ok("rm -r /mnt/storm")


def declare_dead(rig, member):
    """What the host does when a QEMU is gone: the epoch ends, the others are told."""
    with open(rig.zone, "r+b") as f, mmap.mmap(f.fileno(), 4096 + 64 * 256) as m:
        at = 4096 + member * 256
        epoch = struct.unpack_from("<Q", m, at)[0] >> 32
        struct.pack_into("<Q", m, at, (epoch + 1) << 32 | 3)
        for i in range(64):
            pending = 4096 + i * 256 + 64
            struct.pack_into("<Q", m, pending, struct.unpack_from("<Q", m, pending)[0] | 32)


def both(a, b, command, timeout=TIMEOUT):
    """The command in both at once, %d being 0 and 1."""
    for i, g in enumerate((a, b)):
        g.start(command.replace("%d", str(i)))
    got = [g.finish(timeout) for g in (a, b)]
    for g, (rc, out) in zip((a, b), got):
        need(rc == 0, "%s: `%s`: %s" % (g.name, command, out))
    return [out for _, out in got]


# --- running ---------------------------------------------------------------------------------------------------------


def from_kit(series, work):
    """A kernel of the guest kit, laid out as if it were installed below a folder; its release and headers."""
    kit = os.path.join(os.environ.get("TOMBOLO_CACHE", os.path.join(ROOT, ".cache")), "guest", series)
    if not os.path.exists(os.path.join(kit, "release")):
        sys.exit("no kernel %s in the guest kit (%s): run `make guest`" % (series, kit))
    with open(os.path.join(kit, "release")) as f:
        release = f.read().strip()
    root = os.path.join(work, "kit")
    os.makedirs(os.path.join(root, "lib/modules"), exist_ok=True)
    os.makedirs(os.path.join(root, "boot"), exist_ok=True)
    os.symlink(os.path.abspath(os.path.join(kit, "modules")), os.path.join(root, "lib/modules", release))
    os.symlink(os.path.abspath(os.path.join(kit, "vmlinuz")), os.path.join(root, "boot", "vmlinuz-" + release))
    # The kernel's build system refuses a path with a space, which the link .cache may have and its target has not (guest/cache.sh).
    return release, root, os.path.realpath(os.path.join(kit, "build"))


def build(kernel, headers, work):
    out = os.path.join(work, "build-" + kernel)
    made = subprocess.run(["make", "-C", os.path.dirname(HERE), "KDIR=" + headers, "OUT=" + out], capture_output=True, text=True)
    if made.returncode:
        sys.exit("tombolo.ko does not build for %s:\n%s%s" % (kernel, made.stdout[-3000:], made.stderr[-3000:]))
    if " warning: " in made.stderr:
        sys.exit("tombolo.ko builds with warnings for %s:\n%s" % (kernel, made.stderr[-3000:]))
    return os.path.join(out, "tombolo.ko")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--kernel", action="append", default=[])
    p.add_argument("--kit", action="append", default=[], metavar="SERIES")
    p.add_argument("--root", default="/")
    p.add_argument("--module", help="tombolo.ko for the one --kernel, where another compiler builds it")
    p.add_argument("--suites", help="folder with the programs fsx (crate fsx 0.3.2) and pjdfstest (0.2.2): run these, too")
    p.add_argument("--keep", action="store_true", help="keep the work folder, with the guests' consoles")
    p.add_argument("claims", nargs="*")
    o = p.parse_args()
    if not o.kernel and not o.kit:
        images = [os.path.basename(i)[len("vmlinuz-"):] for i in glob.glob(os.path.join(o.root, "boot/vmlinuz-*"))]
        o.kernel = [k for k in images if os.path.isdir("/usr/src/linux-headers-" + k)]
    if not o.kernel and not o.kit:
        sys.exit("no kernel with headers found: install linux-image-cloud-amd64 and linux-headers-cloud-amd64, or name one with --kernel")
    work = tempfile.mkdtemp(prefix="tombolo-claims-")
    passed, failed = 0, []
    try:
        flags = ["-O2", "-Wall", "-Wextra", "-I" + ROOT + "/files/core", "-I" + ROOT + "/zone/format"]
        subprocess.run(["cc", *flags, HERE + "/mkzone.c", *glob.glob(ROOT + "/files/core/*.c"), "-o", work + "/mkzone"], check=True)
        subprocess.run(["cc", *flags, HERE + "/damage.c", ROOT + "/files/fuzz/mutate.c", "-o", work + "/damage"], check=True)
        programs = [work + "/" + p for p in ("claims", "hear", "abuse", "idmapped", "differ", "handles")]
        for p in programs:
            subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-static", HERE + "/" + os.path.basename(p) + ".c", "-o", p], check=True)
        kernels = [(k, o.root, "/usr/src/linux-headers-" + k) for k in o.kernel] + [from_kit(k, work) for k in o.kit]
        for kernel, root, headers in kernels:
            suites = glob.glob(o.suites + "/fsx") + glob.glob(o.suites + "/pjdfstest") if o.suites else []
            base = (kernel, os.path.join(root, "boot/vmlinuz-" + kernel), root, o.module or build(kernel, headers, work))
            rig = Rig(*base, work, [*programs, *suites], modules=["overlay"])
            rig.without_module = lambda more: Rig(*base, tempfile.mkdtemp(dir=work), [*programs, *more], modules=["fuse"], late=True)
            rig.host = lambda more: Rig(*base, tempfile.mkdtemp(dir=work), [*programs, work + "/mkzone", *more], modules=["fuse"])
            rig.programs = {os.path.basename(s) for s in suites}
            p, f = run(rig, work, o)
            passed += p
            failed += f
    finally:
        if o.keep:
            print("consoles are in", work)
        else:
            shutil.rmtree(work)
    print("%d passed, %d failed" % (passed, len(failed)))
    sys.exit(1 if failed else 0)


def run(rig, work, o):
    """Claims with the same needs share their guests; a claim that fails gets its guests replaced for the next."""
    zone = rig.zone = "/dev/shm/" + os.path.basename(work)
    passed, failed, guests, has = 0, [], [], None
    order = sorted(CLAIMS, key=lambda c: str((c[1], sorted((k, v) for k, v in c[2].items() if k != "needs"))))
    try:
        for f, n, options in order:
            name = f.__name__
            if o.claims and not any(c in name for c in o.claims):
                continue
            if options.get("needs", None) not in rig.programs | {None}:
                continue
            wants = (n, {k: v for k, v in options.items() if k != "needs"})
            start = time.monotonic()
            error = None
            try:
                if wants != has or not guests:
                    stop(guests)
                    args = ["%s=%d" % (o, options[o]) for o in ("ro", "grant") if o in options]
                    subprocess.run([work + "/mkzone", zone, str(ZONE_MIB), "8", *args], check=True)
                    guests = []
                    for i in range(n):
                        guests.append(rig.boot("g%d" % i, zone, ZONE_MIB, smp=options.get("smp", 2)))
                    has = wants
                if options.get("mount", True):
                    for g in guests:
                        g.ok("mount -t tombolo test /mnt")
                f(*guests)
                guests = [g for g in guests if g.process.poll() is None]
                if options.get("mount", True):
                    for g in guests:
                        if not hasattr(g, "damaged"):
                            g.ok("umount /mnt")
                for g in guests:
                    bad = g.complaints()
                    need(not bad, "%s: the kernel complained: %s" % (g.name, bad[:3]))
                    if hasattr(g, "damaged"):
                        continue
                    damage = [l for l in g.ok("dmesg").splitlines() if "is damaged" in l]
                    need(not damage, "%s: %s" % (g.name, damage[:3]))
            except Failed as e:
                error = str(e)
            took = time.monotonic() - start
            print("%-5s %s [%s, %.1f s]" % ("ok" if not error else "FAIL", name, rig.kernel, took), flush=True)
            if error:
                failed.append(name)
                for g in guests:
                    tail = g.log()[-1500:]
                    error += "\n--- console of %s:\n%s" % (g.name, tail)
                print("      " + error.replace("\n", "\n      "), flush=True)
                stop(guests)
                guests = []
            else:
                passed += 1
            if "dies" in options:
                stop(guests)
                guests = []
        return passed, failed
    finally:
        stop(guests)
        if os.path.exists(zone):
            os.unlink(zone)


def stop(guests):
    for g in guests:
        g.off()


if __name__ == "__main__":
    main()
