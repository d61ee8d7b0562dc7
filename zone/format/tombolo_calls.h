/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The CALLS area: channels between processes of one VM and a server (calls/).
 *
 *	0	struct tmb_calls_header		one page
 *	4096	channels, 'channel_size' bytes each:
 *		0		struct tmb_calls_channel	one page: who was rung
 *		4096		the ring to the server: a page of words, 'ring' bytes of data
 *		8192 + ring	the ring to the client, the same
 *		12288 + 2 ring	the window, 'window' bytes
 *
 * A process of the guest opens the device. Its driver takes a free channel for it (FREE -> WANTED), and the process can map only that
 * channel. The server starts a worker, which gets only that channel (WANTED -> SERVED). When the process closes the device, also by
 * dying, its driver changes the state to LEFT; when the worker ends, the server changes it to LOST. The server clears a LEFT channel
 * before it is free again, so that no process finds an earlier one's data, and then rings the VM.
 * The server is a process of the host, or of another VM, the owner of an accelerator (/dev/tombolo-serve-UUID, below). A guest can't
 * return memory to the host, so an owner's server only marks a channel as done (LEFT -> DONE), and the host clears it (DONE -> FREE).
 * When the owner's server or its VM dies, the VM's kernel or the host sets the doorbell to 0 and all WANTED and SERVED channels to LOST.
 *
 * Before it rings, each side sets the other side's word in the channel's page, so that one doorbell serves all channels of a VM.
 */
#ifndef TOMBOLO_CALLS_H
#define TOMBOLO_CALLS_H

#include "tombolo_zone.h"

#define TMB_CALLS_MAGIC 0x534c4c4143424d54ULL /* "TMBCALLS" */
#define TMB_CALLS_VERSION 1
#define TMB_CALLS_CHANNELS 64
#define TMB_CALLS_FIRST 4096
#define TMB_CALLS_RINGS_OFF 4096

/* States of a channel: bits 0-7 of its word; bits 32-63 grow with each use. */
#define TMB_CALLS_FREE 0
#define TMB_CALLS_WANTED 1
#define TMB_CALLS_SERVED 2
#define TMB_CALLS_LOST 3
#define TMB_CALLS_LEFT 4
#define TMB_CALLS_DONE 5 /* left, and its worker has ended: the host clears it */

struct tmb_calls_header {
	/* 0: written by the server, magic last */
	tmb_u64 magic;
	tmb_u32 version;
	tmb_u32 n_channels;
	tmb_u64 channel_size; /* multiple of TMB_PAGE */
	tmb_u64 ring;	      /* data bytes of each ring: a power of two, at least 4096 */
	tmb_u64 window;	      /* multiple of TMB_PAGE */
	tmb_u32 doorbell;     /* of the server: ivshmem peer id + 1; 0: there is no server */
	tmb_u32 pad0;
	tmb_u8 pad1[2048 - 48];
	/* 2048 */
	tmb_u64 states[TMB_CALLS_CHANNELS];
	tmb_u8 pad2[4096 - 2048 - 8 * TMB_CALLS_CHANNELS];
};
_Static_assert(sizeof(struct tmb_calls_header) == 4096, "calls header size");
_Static_assert(offsetof(struct tmb_calls_header, states) == 2048, "states");

struct tmb_calls_channel {
	tmb_u64 server_rung; /* not 0: the client rang the server */
	tmb_u64 pad0[15];
	tmb_u64 client_rung; /* not 0: the server rang the client */
	tmb_u64 pad1[512 - 17];
};
_Static_assert(sizeof(struct tmb_calls_channel) == 4096, "calls channel size");
_Static_assert(offsetof(struct tmb_calls_channel, client_rung) == 128, "client_rung");

static inline tmb_u32 tmb_calls_state(tmb_u64 word)
{
	return word & 0xff;
}
/* Returns the word of the same use of a channel in another state. */
static inline tmb_u64 tmb_calls_to(tmb_u64 word, tmb_u32 state)
{
	return (word & ~0xffULL) | state;
}

/* --- /dev/tombolo-calls-NAME in a guest: an open file is a channel; mmap at offset 0 gives it ------------------ */

struct tmb_calls_info {
	tmb_u64 channel_size;
	tmb_u64 ring;
	tmb_u64 window;
};
#define TMB_CALLS_IOC_INFO 0x80185443 /* _IOR('T', 0x43, struct tmb_calls_info) */
/* Sleeps until the count of this channel's rings differs from *arg, and returns the count; ENOTCONN: the server has ended. */
#define TMB_CALLS_IOC_WAIT 0xc0085444 /* _IOWR('T', 0x44, __u64) */
/* Rings the server. */
#define TMB_CALLS_IOC_RING 0x5445 /* _IO('T', 0x45) */
/* Adds one to the count: wakes this process' sleeping threads. */
#define TMB_CALLS_IOC_WAKE 0x5446 /* _IO('T', 0x46) */

/*
 * --- /dev/tombolo-serve-UUID in the VM that owns an accelerator: the server's side of a client VM's zone ---------
 *
 * Opened for reading and writing it is the server, one at a time: the next opener sleeps until this one, its mappings included, is
 * gone; then what it served is lost to its clients.
 *	mmap	the whole area, from its first byte on
 *	read	8 bytes: sleeps until the client VM has rung since the last read; gives the client VM's life, a number that no other life of it
 *		has, 0: it isn't there. The first read doesn't sleep, and from then on channels can be taken
 * Opened for writing only it is the client VM's doorbell:
 *	write	rings the client VM, whatever is written
 */

#endif
