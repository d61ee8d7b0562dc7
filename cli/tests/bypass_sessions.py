#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Attacks the sessions of tombolo_bypass_host: wrong requests, files that outlive their process, a device that changes its driver meanwhile, and deaths of a
supervisor and a QEMU in any order.

sessions.py ADDRESS SECONDS: a PCI device that is alone in its IOMMU group and has the driver nvme. Exit code 0: each request was refused as it should be,
all memory has gone back, and the device has its driver."""
import array
import errno
import fcntl
import mmap
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

HUGE = 2 << 20
DEVICES = "/sys/bus/pci/devices/"
PIN, ADD, ON, OFF = 0x40287470, 0x40087471, 0x40087472, 0x40087473
SET_IOMMU, SET_CONTAINER, GET_DEVICE = 0x3B66, 0x3B68, 0x3B6A
TYPE1V2 = 3
CONFIG = 7 << 40  # the place of the configuration space in a VFIO device's file
COMMAND, MEMORY, MASTER = 4, 2, 4
CC, MARK = 0x14, 0x460000  # the sizes of queue entries in an NVMe controller's configuration, which a reset clears


def session():
    return os.open("/dev/tombolo-bypass", os.O_RDWR | os.O_CLOEXEC)


def refused(expected, call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        assert error.errno in expected, f"{errno.errorcode[error.errno]}, not {[errno.errorcode[e] for e in expected]}: {arguments}"
    else:
        raise AssertionError(f"taken: {arguments}")


def pin(file, memfd, offset, size, page, frames=None, reserved=0):
    words = array.array("Q", [0] * max(1, min(size // max(page, 1), 1 << 20)))
    place = words.buffer_info()[0] if frames is None else frames
    fcntl.ioctl(file, PIN, struct.pack("<iIQQQQ", memfd, reserved, offset, size, page, place))
    return words


def device(address, reserved=0):
    domain, bus, rest = address.split(":")
    slot, function = rest.split(".")
    return struct.pack("<IBBH", int(domain, 16), int(bus, 16), int(slot, 16) << 3 | int(function), reserved)


def ask(file, request, address, reserved=0):
    fcntl.ioctl(file, request, device(address, reserved))


def huge_memfd(pages):
    memfd = os.memfd_create("attack", 0x4)  # MFD_HUGETLB
    os.ftruncate(memfd, pages * HUGE)
    return memfd


def free():
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("HugePages_Free:"))


def all_free(before):
    """The last close of a file may come a moment after the death of its process."""
    end = time.monotonic() + 60
    while free() != before:
        assert time.monotonic() < end, f"{before - free()} huge pages have not gone back"


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def bind(address, driver):
    """Returns False where another has changed the device meanwhile."""
    try:
        write(f"{DEVICES}{address}/driver_override", driver + "\n")
        if os.path.exists(f"{DEVICES}{address}/driver"):
            write(f"{DEVICES}{address}/driver/unbind", address)
        write("/sys/bus/pci/drivers_probe", address)
        return os.path.basename(os.readlink(f"{DEVICES}{address}/driver")) == driver
    except OSError:
        return False


def wrong_pins(before):
    file, memfd = session(), huge_memfd(4)
    for offset, size, page in [
        (0, 0, HUGE), (0, HUGE, 4096), (0, HUGE, 0), (4096, HUGE, HUGE), (0, HUGE + 4096, HUGE),
        (1 << 63, 1 << 63, HUGE), ((1 << 64) - HUGE, HUGE, HUGE), ((1 << 64) - HUGE, 2 * HUGE, HUGE), (HUGE, (1 << 63) - HUGE, HUGE),
        (4 * HUGE, HUGE, HUGE), (0, 8 * HUGE, HUGE), (0, 1 << 30, 1 << 30), (0, 1 << 62, HUGE),
    ]:
        refused([errno.EINVAL, errno.E2BIG, errno.EFAULT], pin, file, memfd, offset, size, page)
    refused([errno.EINVAL], pin, file, memfd, 0, HUGE, HUGE, None, 1)
    refused([errno.EFAULT], pin, file, memfd, 0, 4 * HUGE, HUGE, 8)
    refused([errno.EBADF], pin, file, 999, 0, HUGE, HUGE)
    reader = os.open(f"/proc/self/fd/{memfd}", os.O_RDONLY)
    refused([errno.EPERM], pin, file, reader, 0, HUGE, HUGE)
    ends = os.pipe()
    small = os.memfd_create("small")
    os.ftruncate(small, 4 * HUGE)
    for other in [ends[1], small, file, os.open("/dev/null", os.O_RDWR)]:
        refused([errno.EINVAL, errno.EPERM, errno.EFAULT], pin, file, other, 0, HUGE, HUGE)
    refused([errno.EFAULT], fcntl.ioctl, file, PIN, 8)
    refused([errno.ENOTTY], fcntl.ioctl, file, 0x7474, 0)
    # More than there is: what was pinned goes back.
    much = huge_memfd(before + 8)
    refused([errno.ENOMEM, errno.EFAULT, errno.ENOSPC, errno.EINVAL], pin, file, much, 0, (before + 8) * HUGE, HUGE)
    os.close(much)
    frames = pin(file, memfd, 0, 4 * HUGE, HUGE)
    assert len(set(frames)) == 4 and all(frame and frame % HUGE == 0 for frame in frames), frames
    for other in [*ends, small, reader, memfd]:
        os.close(other)
    assert before - free() == 4, f"a session keeps its memory after the memfd: {before - free()}"
    os.close(file)


def wrong_devices(address):
    file, other = session(), session()
    refused([errno.ENODEV], ask, file, ADD, address)  # its driver is nvme
    refused([errno.ENXIO], ask, file, ADD, "00ff:ff:1f.7")
    refused([errno.ENXIO], ask, file, ON, address)
    refused([errno.EINVAL], ask, file, ADD, address, 1)
    refused([errno.EFAULT], fcntl.ioctl, file, ADD, 8)
    assert bind(address, "vfio-pci")
    ask(file, ADD, address)
    refused([errno.EBUSY], ask, file, ADD, address)
    refused([errno.EBUSY], ask, other, ADD, address)
    refused([errno.EINVAL], ask, file, ON, address)  # no memory
    memfd = huge_memfd(1)
    pin(file, memfd, 0, HUGE, HUGE)
    refused([errno.ENODEV], ask, file, ON, address)  # nobody has its group
    ask(file, OFF, address)
    # A driver that the device has got since is not reset under it, and its DMA stays its own.
    assert bind(address, "nvme")
    refused([errno.ENODEV], ask, file, ON, address)
    os.close(file)
    assert bind(address, "vfio-pci")
    ask(other, ADD, address)
    os.close(other)
    os.close(memfd)
    assert bind(address, "nvme")


def files_that_outlive_their_process(before):
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        file, memfd = session(), huge_memfd(4)
        pin(file, memfd, 0, 4 * HUGE, HUGE)
        socket.send_fds(ours, [b"x"], [file])
        os._exit(0)
    os.wait()
    ours.close()
    # It lies in the socket alone.
    assert before - free() == 4, "a session ends while a socket has it"
    _, [file], _, _ = socket.recv_fds(theirs, 1, 1)
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    os.close(file)
    theirs.close()
    assert before - free() == 4, "a session ends while a child has it"
    os.kill(child, 9)
    os.wait()


def another_process_with_the_file(address):
    """QEMU has a session's file, so that the session outlives its supervisor. It asks for nothing there."""
    file, memfd = session(), huge_memfd(1)
    assert bind(address, "vfio-pci")
    child = os.fork()
    if child == 0:
        refused([errno.EPERM], pin, file, memfd, 0, HUGE, HUGE)
        for request in [ADD, ON, OFF]:
            refused([errno.EPERM], ask, file, request, address)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, "another process than the one that began a session asks for something in it"
    ask(file, ADD, address)
    os.close(file)
    os.close(memfd)
    assert bind(address, "nvme")


def threads_in_one_session(address, seconds):
    """A device changes its driver while sessions come and go, and threads ask for everything in one of them."""
    end = time.monotonic() + seconds
    counts = dict.fromkeys(["bound", "added", "refused", "pinned"], 0)

    def rebind():
        while time.monotonic() < end:
            counts["bound"] += bind(address, "vfio-pci") + bind(address, "nvme")

    def come_and_go():
        while time.monotonic() < end:
            file = session()
            for request in [ADD, ON, OFF, ON]:
                try:
                    ask(file, request, address)
                    counts["added"] += request == ADD
                except OSError:
                    counts["refused"] += 1
            os.close(file)

    def pin_on(file, memfd):
        while time.monotonic() < end:
            try:
                pin(file, memfd, 0, HUGE, HUGE)
                counts["pinned"] += 1
            except OSError:
                pass
            try:
                ask(file, ADD, address)
            except OSError:
                pass
            os.close(os.dup(file))

    shared, memfd = session(), huge_memfd(1)
    threads = [threading.Thread(target=rebind), threading.Thread(target=come_and_go), threading.Thread(target=come_and_go)]
    threads += [threading.Thread(target=pin_on, args=(shared, memfd)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(shared)
    os.close(memfd)
    assert counts["bound"] and counts["added"] and counts["refused"] and counts["pinned"], counts
    print(counts)


def group_of(address):
    return "/dev/vfio/" + os.path.basename(os.readlink(f"{DEVICES}{address}/iommu_group"))


def qemu(address, file, is_first, ready, go):
    """A stand-in for QEMU: it has the group, the device and the session, and marks the device once that is untranslated."""
    if is_first:
        os.dup2(file, 200)  # Linux releases the files of a process that dies in the reverse order of their numbers: this one before VFIO's.
        os.close(file)
    container, group = os.open("/dev/vfio/vfio", os.O_RDWR), os.open(group_of(address), os.O_RDWR)
    fcntl.ioctl(group, SET_CONTAINER, struct.pack("i", container))
    fcntl.ioctl(container, SET_IOMMU, TYPE1V2)
    vfio = fcntl.ioctl(group, GET_DEVICE, bytearray(address.encode() + b"\0"), True)
    os.write(ready, b"x")
    os.read(go, 1)
    os.pwrite(vfio, struct.pack("<H", MEMORY | MASTER), CONFIG + COMMAND)
    os.pwrite(vfio, struct.pack("<I", MARK), CC)
    assert os.pread(vfio, 4, CC) == struct.pack("<I", MARK)
    os.write(ready, b"x")
    time.sleep(1000)


def supervisor(address, is_first, report):
    """A stand-in for a supervisor: it begins the session, starts a QEMU, switches the device on, and reports QEMU's number."""
    file, memfd = session(), huge_memfd(8)
    (ready, qemus_ready), (qemus_go, go) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(memfd)
        qemu(address, file, is_first, qemus_ready, qemus_go)
    pin(file, memfd, 0, 8 * HUGE, HUGE)
    assert os.read(ready, 1)
    ask(file, ADD, address)
    ask(file, ON, address)
    os.write(go, b"x")
    assert os.read(ready, 1)
    os.write(report, struct.pack("i", child))
    time.sleep(1000)


def forked(function, *arguments):
    child = os.fork()
    if child == 0:
        try:
            function(*arguments)
        finally:
            os._exit(1)
    return child


def left_in(address):
    """The mark, or what is in its place. The device is bound to no driver and not open."""
    write(f"{DEVICES}{address}/power/control", "on")
    with open(f"{DEVICES}{address}/config", "r+b", buffering=0) as config:
        config.seek(COMMAND)
        config.write(struct.pack("<H", MEMORY))
    file = os.open(f"{DEVICES}{address}/resource0", os.O_RDWR)
    with mmap.mmap(file, 4096) as registers:
        left = struct.unpack_from("<I", registers, CC)[0]
    os.close(file)
    write(f"{DEVICES}{address}/power/control", "auto")
    return left


def until(what, *arguments):
    end = time.monotonic() + 60
    while not what(*arguments):
        assert time.monotonic() < end, f"{what.__name__}{arguments} does not come true"


def can_be_opened(path):
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        assert error.errno == errno.EBUSY, error
        return False
    return True


def is_gone(process):
    return not os.path.exists(f"/proc/{process}")


def is_in_the_kernel(process):
    """It sleeps there for an event that no signal ends, or that only one ends."""
    with open(f"/proc/{process}/wchan") as file:
        return "vfio_unregister" in file.read()


def die(order, address, child, grandchild):
    """Kills the supervisor and its QEMU. With `unbound`, another process is unbinding the device's driver meanwhile, and waits for QEMU."""
    unbinder = None
    if order == "unbound":
        unbinder = subprocess.Popen(["sh", "-c", f"echo {address} >{DEVICES}{address}/driver/unbind"])
        until(is_in_the_kernel, unbinder.pid)
    first, second = (grandchild, child) if order == "qemu" else (child, grandchild)
    os.kill(first, signal.SIGKILL)
    if order in ("supervisor", "qemu"):
        time.sleep(random.random() / 5)
    os.kill(second, signal.SIGKILL)
    os.waitpid(child, 0)
    until(is_gone, grandchild)
    if unbinder:
        assert unbinder.wait(60) == 0
    else:
        until(can_be_opened, group_of(address))
        write(f"{DEVICES}{address}/driver/unbind", address)


def deaths(address, seconds, before):
    """The device is reset, its configuration is what it was, and the memory has gone back, whoever dies first or at the same time."""
    end = time.monotonic() + seconds
    counts = dict.fromkeys(["both", "supervisor", "qemu", "unbound"], 0)
    turn = 0
    while time.monotonic() < end:
        order = list(counts)[turn % 4]
        assert bind(address, "vfio-pci")
        ours, theirs = os.pipe()
        child = forked(supervisor, address, turn % 8 < 4, theirs)
        os.close(theirs)
        grandchild = struct.unpack("i", os.read(ours, 4))[0]
        os.close(ours)
        die(order, address, child, grandchild)
        all_free(before)
        left = left_in(address)
        assert left == 0, f"{order}: the device was not reset: {left:#x}"
        assert bind(address, "nvme"), f"{order}: its driver does not take the device back"
        counts[order] += 1
        turn += 1
    assert all(counts.values()), counts
    print(f"deaths by what died first: {counts}")


def main():
    address, before = sys.argv[1], free()
    wrong_pins(before)
    all_free(before)
    wrong_devices(address)
    all_free(before)
    files_that_outlive_their_process(before)
    all_free(before)
    another_process_with_the_file(address)
    all_free(before)
    threads_in_one_session(address, float(sys.argv[2]))
    all_free(before)
    deaths(address, float(sys.argv[2]), before)
    assert bind(address, "nvme")
    write(f"{DEVICES}{address}/driver_override", "\n")


main()
