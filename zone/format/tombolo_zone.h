/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A zone: one piece of memory shared by its members (VMs, and processes of their host).
 *
 *	offset 0	struct tmb_zone_header	one 4 KiB page: identity, features, area table
 *	4096		struct tmb_member[64]	each member's state, epoch and doorbell
 *	...		areas			memory of services, each found by its type and name
 *
 * The host creates the zone, invites members and declares them dead; members join the slot they were invited to.
 * A reader of this memory copies a value, checks the copy, and uses the copy: any member may write anything at any time.
 *
 * This header is the only definition of the format. User space in Rust gets it through bindgen.
 */
#ifndef TOMBOLO_ZONE_H
#define TOMBOLO_ZONE_H

#include "tombolo_atomic.h"

#define TMB_ZONE_MAGIC 0x454e4f5a424d4f54ULL /* "TOMBZONE" */
#define TMB_ZONE_VERSION 1
#define TMB_PAGE 4096ULL
#define TMB_ZONE_ALIGN (2ULL << 20) /* zones, and areas that want huge mappings, are multiples of this */
#define TMB_ZONE_MIN (8ULL << 20)
#define TMB_MAX_AREAS 32
#define TMB_MAX_MEMBERS 64
#define TMB_NAME_LEN 32 /* bytes, NUL padded, UTF-8 */

/* Area types. */
#define TMB_AREA_NONE 0
#define TMB_AREA_FILES 1 /* a file system, files/core/tfs_format.h */
#define TMB_AREA_SYNC 2	 /* named semaphores, mutexes, counters: zone/sync */
#define TMB_AREA_CALLS 3 /* rings and windows of one client: calls/ */

struct tmb_area {
	tmb_u32 type;
	tmb_u32 flags;	/* zero */
	tmb_u64 offset; /* from the start of the zone, multiple of TMB_PAGE */
	tmb_u64 length; /* bytes, multiple of TMB_PAGE */
	char name[TMB_NAME_LEN];
	tmb_u64 reserved;
};
_Static_assert(sizeof(struct tmb_area) == 64, "area size");

struct tmb_zone_header {
	/* 0: identity; written once by the creator, magic last */
	tmb_u64 magic;
	tmb_u32 version;
	tmb_u32 header_size; /* sizeof(struct tmb_zone_header) */
	tmb_u8 uuid[16];
	tmb_u64 size;	     /* of the whole zone in bytes, multiple of TMB_ZONE_ALIGN */
	tmb_u64 compat;	     /* features a reader may ignore */
	tmb_u64 incompat;    /* features a reader must know to attach */
	tmb_u64 ro_compat;   /* features a reader must know to write */
	/* 64 */
	char name[TMB_NAME_LEN];
	tmb_u64 created_ns; /* Unix time */
	tmb_u32 n_areas;
	tmb_u32 n_members;   /* slots in the member table: TMB_MAX_MEMBERS */
	tmb_u64 members_off; /* 4096 */
	tmb_u32 member_size; /* sizeof(struct tmb_member) */
	tmb_u32 pad0;
	/* 128: changes when a host process takes the zone over; its heartbeat */
	tmb_u64 session; /* random, new each time a host process opens the zone */
	tmb_u64 heartbeat_ns;
	tmb_u8 pad1[48];
	/* 192 */
	tmb_u8 pad2[64];
	/* 256 */
	struct tmb_area areas[TMB_MAX_AREAS];
	tmb_u8 pad3[4096 - 256 - 64 * TMB_MAX_AREAS];
};
_Static_assert(sizeof(struct tmb_zone_header) == 4096, "header size");
_Static_assert(offsetof(struct tmb_zone_header, name) == 64, "name");
_Static_assert(offsetof(struct tmb_zone_header, session) == 128, "session");
_Static_assert(offsetof(struct tmb_zone_header, areas) == 256, "areas");

/* States of a member slot, in bits 0-7 of state_epoch. */
#define TMB_MEMBER_EMPTY 0
#define TMB_MEMBER_INVITED 1 /* the host keeps the slot for 'name', which has not joined */
#define TMB_MEMBER_ACTIVE 2
#define TMB_MEMBER_DEAD 3 /* the host has declared it dead; its locks and references wait for recovery */

/* Epochs are below this: a slot whose epoch is not was written by a member, and the owner gives it a new one. */
#define TMB_EPOCH_END 0x80000000u

/* Roles. */
#define TMB_ROLE_VM 1
#define TMB_ROLE_HOST 2 /* a process on the host: FUSE mount, service, tool */

/* Rights, granted by the host. */
#define TMB_RIGHT_WRITE 1u
/* In 'rights', too, of a VM: its own process holds its liveness, so the VM is dead once nobody does, whatever became of the owner. */
#define TMB_HELD_BY_VM 2u
/* In 'rights', too, of a VM: it was let in though its process does not hold its liveness; it lives until the host's next boot. */
#define TMB_ASSUMED 4u

/* Reasons for a doorbell, set in the target's 'pending' before ringing; the doorbell itself carries none. */
#define TMB_PENDING_REVOKE 1ULL	 /* blocks of a file you map were removed: unmap it (files) */
#define TMB_PENDING_LOCK 2ULL	 /* a lock you wait for may be free */
#define TMB_PENDING_EVENT 4ULL	 /* change events */
#define TMB_PENDING_SYNC 8ULL	 /* zone/sync */
#define TMB_PENDING_CALLS 16ULL	 /* calls/ */
#define TMB_PENDING_MEMBERS 32ULL /* the member table changed */

struct tmb_member {
	/* 0: identity; the host writes it, except that the member moves INVITED -> ACTIVE -> INVITED itself */
	tmb_u64 state_epoch; /* bits 0-7 state, bits 32-63 epoch; the epoch grows at each join and each death */
	tmb_u32 doorbell;    /* ivshmem peer id + 1; 0: none, the member polls 'pending' */
	tmb_u32 role;
	tmb_u32 rights;
	tmb_u32 boot; /* the host's boot in which the slot was kept or its VM let in: a number in bits 0-15; 0, 1: unknown */
	char name[TMB_NAME_LEN];
	tmb_u64 pad1;
	/* 64: written by other members */
	tmb_u64 pending; /* TMB_PENDING_*, set by fetch_or, taken by exchange with 0 */
	tmb_u64 pad2[7];
	/* 128: written by the member */
	tmb_u64 heartbeat_ns;
	tmb_u64 pad3[7];
	/* 192: recovery of dead epochs */
	tmb_u64 recovered_epoch; /* locks and transactions of all epochs up to this one are recovered */
	tmb_u64 recovery_lock;	 /* a lock word (below) */
	tmb_u64 forgotten_epoch; /* files that these epochs had open or mapped are released, too */
	tmb_u64 pad4[5];
};
_Static_assert(sizeof(struct tmb_member) == 256, "member size");
_Static_assert(offsetof(struct tmb_member, pending) == 64, "pending");
_Static_assert(offsetof(struct tmb_member, recovered_epoch) == 192, "recovered_epoch");

static inline tmb_u64 tmb_state_epoch(tmb_u32 state, tmb_u32 epoch)
{
	return (tmb_u64)epoch << 32 | (state & 0xff);
}
static inline tmb_u32 tmb_state(tmb_u64 state_epoch)
{
	return state_epoch & 0xff;
}
static inline tmb_u32 tmb_epoch(tmb_u64 state_epoch)
{
	return state_epoch >> 32;
}

/*
 * A lock word names its owner, so that a waiter can find out whether the owner lives: bits 0-7 member id + 1 (0: free),
 * bits 8-31 a tag of the owner's choice, bits 32-63 the owner's epoch. A word whose epoch is not its member's current
 * one belongs to a dead member: a waiter recovers that member, then takes the word over by compare and swap.
 */
struct tmb_lock {
	tmb_u64 word;
	tmb_u64 waiters; /* bit per member that sleeps on it; the unlocker rings these */
};

static inline tmb_u64 tmb_lock_word(tmb_u32 member, tmb_u32 epoch, tmb_u32 tag)
{
	return (tmb_u64)epoch << 32 | (tmb_u64)(tag & 0xffffff) << 8 | ((member + 1) & 0xff);
}
static inline tmb_u32 tmb_lock_owner(tmb_u64 word) /* only meaningful where word is not 0 */
{
	return (word & 0xff) - 1;
}

/*
 * The doorbell device (ivshmem-doorbell) of a VM carries this page as its memory part, which names the doorbell's zone.
 * A guest finds its member slot by the slot whose 'doorbell' is its own peer id + 1.
 */
#define TMB_DOORBELL_MAGIC 0x4c4c4542424d4f54ULL /* "TOMBBELL" */
struct tmb_doorbell_page {
	tmb_u64 magic;
	tmb_u8 zone_uuid[16];
	tmb_u8 pad[4096 - 24];
};
_Static_assert(sizeof(struct tmb_doorbell_page) == 4096, "doorbell page size");

#endif
