/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The SYNC area: named semaphores, mutexes, read-write locks and event counters for processes of all members.
 *
 *	0	struct tmb_sync_header	one page, with the sessions
 *	4096	u64 keys[4096]		index: the hash of each object's name, 0: free
 *	36864	struct tmb_sync_object[]
 *
 * A session is one process that has the area open. Lock words (tombolo_zone.h) carry it in their tag, so that a process can die without its member. In
 * a guest the kernel frees the session when the process closes the device; on the host the zone's server frees it when the lock on its byte of the
 * zone's file is gone.
 *
 * Objects are found within a window of TMB_SYNC_WINDOW keys from their hash on. Creating and destroying take the header's lock.
 *
 * Sleeping: a waiter reads 'seq', sets its member's bit in 'waiters', looks again, and sleeps while 'seq' is what it read. A
 * waker changes the value, takes all of 'waiters', and if that was not empty adds 1 to 'seq' and wakes those members. Sleeps
 * are cut into pieces of TMB_SYNC_SLICE_NS, so that a waker that dies in between costs no more than that.
 */
#ifndef TOMBOLO_SYNC_H
#define TOMBOLO_SYNC_H

#include "tombolo_zone.h"

#define TMB_SYNC_MAGIC 0x434e5953424d4f54ULL /* "TOMBSYNC" */
#define TMB_SYNC_VERSION 1
#define TMB_SYNC_SESSIONS 256
#define TMB_SYNC_KEYS 4096
#define TMB_SYNC_KEYS_OFF 4096
#define TMB_SYNC_OBJECTS_OFF 36864
#define TMB_SYNC_WINDOW 64
#define TMB_SYNC_NAME 48 /* with its NUL */
#define TMB_SYNC_SLICE_NS 250000000ULL

#define TMB_SYNC_SEMAPHORE 1
#define TMB_SYNC_MUTEX 2
#define TMB_SYNC_RWLOCK 3
#define TMB_SYNC_EVENT 4

struct tmb_sync_header {
	tmb_u64 magic; /* written last */
	tmb_u32 version;
	tmb_u32 n_objects; /* <= TMB_SYNC_KEYS */
	tmb_u64 incompat;
	tmb_u64 lock; /* a lock word: creating, destroying */
	tmb_u64 ending; /* under 'lock': the object that is being destroyed, + 1; the next owner of the lock completes that after a death */
	tmb_u8 pad0[24];
	/* 64: requests of host processes to the zone's server: ring these members */
	tmb_u64 ring_mask;
	tmb_u32 ring_seq; /* futex */
	tmb_u32 pad1;
	tmb_u64 host; /* tmb_state_epoch(member id + 1, epoch) of the host's member; 0: the zone has no server */
	tmb_u8 pad2[40];
	/* 128: objects whose sleepers on the host are to be woken; set by guests, before they ring the host */
	tmb_u64 host_wake[TMB_SYNC_KEYS / 64];
	tmb_u8 pad3[2048 - 128 - TMB_SYNC_KEYS / 8];
	/* 2048 */
	tmb_u64 sessions[TMB_SYNC_SESSIONS]; /* tmb_session_word() */
};
_Static_assert(sizeof(struct tmb_sync_header) == 4096, "sync header size");
_Static_assert(offsetof(struct tmb_sync_header, ring_mask) == 64, "ring_mask");
_Static_assert(offsetof(struct tmb_sync_header, sessions) == 2048, "sessions");

struct tmb_sync_object {
	/* 0: identity */
	tmb_u32 type;
	tmb_u32 pad0;
	char name[TMB_SYNC_NAME];
	tmb_u8 pad1[8];
	/* 64: hot */
	tmb_u64 value;	    /* semaphore: generation << 32 | count; mutex, rwlock: lock word; event: count */
	tmb_u64 waiters;    /* bit per member */
	tmb_u32 seq;	    /* futex */
	tmb_u32 generation; /* grows when the object is destroyed */
	tmb_u8 pad2[40];
	/* 128: rwlock: bit per session that reads */
	tmb_u64 readers[TMB_SYNC_SESSIONS / 64]; /* of a slot's present session: tmb_session_clear_reads */
	tmb_u8 pad3[96];
};
_Static_assert(sizeof(struct tmb_sync_object) == 256, "sync object size");
_Static_assert(offsetof(struct tmb_sync_object, value) == 64, "value");
_Static_assert(offsetof(struct tmb_sync_object, readers) == 128, "readers");

/* The word of a live session: bit 0 set, member in bits 8-15, generation in bits 16-31, the member's epoch in bits 32-63. */
static inline tmb_u64 tmb_session_word(tmb_u32 member, tmb_u32 generation, tmb_u32 epoch)
{
	return (tmb_u64)epoch << 32 | (tmb_u64)(generation & 0xffff) << 16 | (tmb_u64)(member & 0xff) << 8 | 1;
}
/* Returns the tag in the lock words of a session. */
static inline tmb_u32 tmb_session_tag(tmb_u32 session, tmb_u64 session_word)
{
	return (tmb_u32)(session_word >> 16 & 0xffff) << 8 | (session & 0xff);
}

/* Returns whether the member is active in this epoch. */
static inline bool tmb_member_lives(struct tmb_member *members, tmb_u32 member, tmb_u32 epoch)
{
	return member < TMB_MAX_MEMBERS &&
	       tmb_load_acquire(&members[member].state_epoch) == tmb_state_epoch(TMB_MEMBER_ACTIVE, epoch);
}

static inline bool tmb_session_lives(struct tmb_member *members, tmb_u64 word)
{
	return (word & 1) && tmb_member_lives(members, word >> 8 & 0xff, word >> 32);
}

/* Tries to take session slot i (free, or of a dead member) for a process of a member. Returns the session's word, or 0. */
static inline tmb_u64 tmb_session_take(struct tmb_sync_header *h, struct tmb_member *members, tmb_u32 i, tmb_u32 member,
				       tmb_u32 epoch)
{
	tmb_u64 old = tmb_load_acquire(&h->sessions[i]);
	tmb_u64 word = tmb_session_word(member, (tmb_u32)(old >> 16) + 1, epoch);

	return !tmb_session_lives(members, old) && tmb_cas64(&h->sessions[i], old, word) ? word : 0;
}

/*
 * Clears the read locks of session slot i. A process calls this after it has taken the slot and before it locks anything, since a dead predecessor may
 * have left bits. Waiting writers look again within a slice.
 */
static inline void tmb_session_clear_reads(struct tmb_sync_header *h, tmb_u32 n_objects, tmb_u32 i)
{
	struct tmb_sync_object *o = (struct tmb_sync_object *)((tmb_u8 *)h + TMB_SYNC_OBJECTS_OFF);
	tmb_u64 bit = 1ULL << i % 64;

	for (; n_objects; n_objects--, o++)
		if (tmb_load(&o->readers[i / 64]) & bit)
			tmb_fetch_and(&o->readers[i / 64], ~bit);
}

/* Ends a session, unless another process has the slot by now. Its generation stays. */
static inline void tmb_session_free(struct tmb_sync_header *h, tmb_u32 i, tmb_u64 word)
{
	tmb_cas64(&h->sessions[i], word, word & ~1ULL);
}

/* Returns whether the owner of a lock word lives: its member in this epoch, and its session. */
static inline bool tmb_sync_owner_lives(struct tmb_sync_header *h, struct tmb_member *members, tmb_u64 lock_word)
{
	tmb_u32 tag = lock_word >> 8 & 0xffffff;
	tmb_u64 expect = tmb_session_word(tmb_lock_owner(lock_word), tag >> 8, lock_word >> 32);

	return tmb_load_acquire(&h->sessions[tag & 0xff]) == expect && tmb_session_lives(members, expect);
}

/* --- /dev/tombolo-sync-UUID in a guest: mmap at offset 0 gives the area -------------------------------------- */

struct tmb_sync_info {
	tmb_u64 area_len;
	tmb_u64 session_word;
	tmb_u32 session;
	tmb_u32 member;
	tmb_u32 epoch;
	tmb_u32 pad;
};
struct tmb_sync_wait {
	tmb_u32 object; /* index */
	tmb_u32 seq;	/* sleep while the object's seq is this */
	tmb_u64 timeout_ns; /* at most TMB_SYNC_SLICE_NS is slept */
};
struct tmb_sync_wake {
	tmb_u32 object;
	tmb_u32 pad;
	tmb_u64 members; /* bit per member to wake; the own one: sleepers of this guest */
};
#ifdef __KERNEL__
#include <linux/ioctl.h>
#else
#include <sys/ioctl.h>
#endif
#define TMB_SYNC_IOC_INFO _IOR('T', 1, struct tmb_sync_info)
#define TMB_SYNC_IOC_WAIT _IOW('T', 2, struct tmb_sync_wait)
#define TMB_SYNC_IOC_WAKE _IOW('T', 3, struct tmb_sync_wake)

#endif
