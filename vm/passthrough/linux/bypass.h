/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The interfaces of the IOMMU bypass: supervisor and host module (ioctl), guest module and supervisor (a page of the guest's memory).
 * Rust has both by bindgen.
 */
#ifndef TOMBOLO_BYPASS_H
#define TOMBOLO_BYPASS_H

#include <linux/ioctl.h>
#include <linux/types.h>

#ifdef __KERNEL__
#include <linux/build_bug.h>
#define TBP_ASSERT(condition) static_assert(condition)
#else
#define TBP_ASSERT(condition) _Static_assert(condition, #condition)
#endif

/*
 * Supervisor and host module: /dev/tombolo-bypass. An open file is a session: the memory of one VM and the devices that reach it. Its last
 * close stops the devices, then gives the memory back. Requests are taken from the process that opened it alone (EPERM).
 */

/* Pins a part of a memfd of huge pages and writes the host-physical address of each of its pages to `frames`. */
struct tbp_pin {
	__s32 memfd;
	__u32 reserved;
	__u64 offset; /* in the memfd; a multiple of `page`, as is `size` */
	__u64 size;
	__u64 page; /* bytes of a page of the memfd: 2 MiB or 1 GiB */
	__u64 frames; /* user address of `size` / `page` words */
};
TBP_ASSERT(sizeof(struct tbp_pin) == 40);

/* A PCI function of the host. */
struct tbp_device {
	__u32 domain;
	__u8 bus;
	__u8 devfn;
	__u16 reserved;
};
TBP_ASSERT(sizeof(struct tbp_device) == 8);

enum tbp_ioctl {
	TBP_IOC_PIN = _IOW('t', 0x70, struct tbp_pin),
	/* Adds a device to the session: it has vfio-pci, is alone in its IOMMU group and can be reset. Its DMA stays as it is. */
	TBP_IOC_ADD = _IOW('t', 0x71, struct tbp_device),
	/* Resets a device and lets its DMA go untranslated, once a VM has its group. */
	TBP_IOC_ON = _IOW('t', 0x72, struct tbp_device),
	/* DMA of a device is blocked, until the next TBP_IOC_ON or until the VM has given its group back. */
	TBP_IOC_OFF = _IOW('t', 0x73, struct tbp_device),
};

/*
 * Guest module and supervisor. The guest fills a page with a request and writes the page's guest-physical address, as 16 hexadecimal digits
 * and a newline, to an I/O port, which is one of QEMU's isa-debugcon. The supervisor takes the request up, answers in the page and sets
 * `status` last. The guest may withdraw a request until the supervisor has taken it up: both do so by compare and exchange of `status`, so a
 * request that the guest has given up is never carried out.
 */
#define TBP_PORT 0x5b0
/* What the port reads. */
#define TBP_PORT_READS 0x7b

#define TBP_MAGIC 0x50594254 /* "TBYP" */
#define TBP_VERSION 2
#define TBP_DEVICES 16 /* of a VM, at most */
#define TBP_FRAMES 448 /* in one answer, at most */
#define TBP_NO_FRAME (~(__u64)0) /* no memory of the VM that is in huge pages */

enum tbp_operation {
	TBP_HELLO = 1, /* answer: `page`, `frames`, `devices`, `functions` */
	TBP_MAP = 2, /* answer: `count` frames from frame `first` on */
	TBP_ON = 3, /* of the device `device`: untranslated DMA */
	TBP_OFF = 4, /* blocked DMA */
};

enum tbp_status {
	TBP_PENDING = 0,
	TBP_DONE = 1,
	TBP_REFUSED = 2,
	TBP_TAKEN = 3, /* by the supervisor, which is going to answer */
	TBP_WITHDRAWN = 4, /* by the guest */
};

/* Little endian, as every guest is. */
struct tbp_page {
	__u32 magic;
	__u16 version;
	__u16 operation;
	__u32 status;
	__u32 device;
	__u64 first;
	__u64 page; /* bytes that a frame has */
	__u64 frames; /* in the whole map: frame N is that of the guest-physical addresses from N * `page` on */
	__u64 highest; /* host-physical address in the map */
	__u32 count;
	__u32 devices;
	__u8 reserved[8];
	__u32 functions[TBP_DEVICES]; /* of each device: bus << 8 | devfn in the guest */
	__u64 frame[TBP_FRAMES]; /* host-physical addresses */
};
TBP_ASSERT(sizeof(struct tbp_page) <= 4096);
TBP_ASSERT(__builtin_offsetof(struct tbp_page, functions) == 64);
TBP_ASSERT(__builtin_offsetof(struct tbp_page, frame) == 128);

#endif
