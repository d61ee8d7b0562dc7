/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The file system's logic, freestanding: the kernel module, the FUSE mount, mkfs, fsck, tests and fuzzers all compile it.
 *
 * Conventions: functions return 0 or a count, or a negative errno (-EUCLEAN: the zone's memory is damaged; -ESTALE: the handle's inode is
 * gone). Handles name inodes across members. Nothing here trusts zone memory: numbers are copied, checked, then used; walks are
 * bounded. Every function takes the locks it needs itself; the _locked ones want tfs_lock_inode() held.
 * No function checks permissions: that is the skin's job, before the call. Times are stamped here.
 *
 * Readers (lookup, readdir, getattr, map, xattr get) take no lock and write no shared line.
 */
#ifndef TFS_H
#define TFS_H

#include "tfs_format.h"
#include "tfs_os.h"

#define TFS_ITABLE_CACHE 128u
#define TFS_BIT_LOCKS 16u
#define TFS_LINE 64u /* threads of one member that can wait in order */

/* A thread that waits for a lock. */
struct tfs_waiter {
	tmb_u64 lock;	/* its address; 0: free */
	tmb_u64 number; /* the order of arrival */
	tmb_u32 bell, pad; /* counts wake-ups; the thread sleeps on it */
};

struct tfs {
	tmb_u8 *area;	  /* the FILES area in this address space */
	tmb_u64 blocks;	  /* checked copies of super block fields */
	tmb_u64 member_start, map_start, data_start, hash_seed;
	struct tmb_member *members; /* the zone's member table, 64 slots; NULL: alone (mkfs, fsck, unit tests) */
	tmb_u32 member;	  /* own id */
	tmb_u32 epoch;	  /* own epoch */
	tmb_u64 root;	  /* the inode that is its root directory */
	bool read_only;
	bool persistent; /* TFS_RO_COMPAT_PERSISTENT */
	bool unclean;	 /* something was left undone, as at a death */
	tmb_u64 alloc_cursor, chunk_cursor, inode_cursor; /* hints, racy on purpose */
	bool reserve_taken; /* and not given back yet */
	tmb_u32 recovery_lock; /* of the member's threads: who has the transaction slot TFS_TX_RECOVERY */
	tmb_u64 itable_cache[TFS_ITABLE_CACHE]; /* where blocks of the inode table lie: its block << 32 | the area's; they never move */
	tmb_u32 bit_locks[TFS_BIT_LOCKS]; /* by inode number: of the member's own bits in 'openers' and 'mappers' */
	tmb_u64 silent; /* bit per member that let a wait for its mappings run out ... */
	tmb_u32 silent_at[TFS_MEMBERS]; /* ... when its 'revokes_begun' was this */
	struct tfs_waiter line[TFS_LINE]; /* wait.c */
	tmb_u64 numbers;
	void *os;	  /* the skin's */
};

/*
 * Names one inode for its whole life. The number alone may mean another inode once this one was freed, so every function that reads or changes
 * an inode compares the generation, writers under the inode's lock. Generation 0: whatever has the number now, for callers that know
 * by other means that it can't change hands (alone with the file system, or told the number by the host).
 */
struct tfs_handle {
	tmb_u64 ino;
	tmb_u32 generation;
};

/* --- a file system as a whole ------------------------------------------------------------------------- */

/* Has all of an inode's data written back where the memory is persistent, also what was stored through mappings. */
int tfs_sync(struct tfs *fs, struct tfs_handle h);

/* Makes an empty file system, with ro_compat features (TFS_RO_COMPAT_PERSISTENT); the root directory belongs to uid:gid with 'mode'.
 * uuid: 16 bytes. Overwrites. */
int tfs_mkfs(void *area, tmb_u64 length, const tmb_u8 *uuid, const char *label, tmb_u64 hash_seed, tmb_u64 area_offset,
	     tmb_u32 uid, tmb_u32 gid, tmb_u32 mode, tmb_u64 ro_compat);
/* Checks the super block and fills 'fs'; read_only and os are the caller's, set before. Cleans up after this member's former life.
 * -EINVAL: no file system here; -EPROTONOSUPPORT: another version or unknown features; -EUCLEAN: damaged. members may be NULL. */
int tfs_open(struct tfs *fs, void *area, tmb_u64 length, struct tmb_member *members, tmb_u32 member, tmb_u32 epoch);

/*
 * A member that maps files, once it has taken TMB_PENDING_REVOKE out of its own 'pending': tfs_revoke, then every mapping of an inode whose
 * tfs_map_seq is another than at its mapping is taken back, then tfs_revoked. If some can't be, the bit is set again instead.
 */
void tfs_revoke(struct tfs *fs);
/* Every mapping that was stale when TMB_PENDING_REVOKE was taken out of the own 'pending' is gone: blocks kept for them become free. Sets the bit
 * again while one of this member's readers stays where it is: then both are to be called once more, after a while. */
void tfs_revoked(struct tfs *fs);

/* To be called when this member's doorbell rang: whoever waits for a lock looks again. */
void tfs_rang(struct tfs *fs);

/* Ends this member's use of it in good order; the caller has dropped all references. */
void tfs_close(struct tfs *fs);

struct tfs_statfs {
	tmb_u64 blocks, blocks_free, inodes, inodes_free;
};
void tfs_statfs(struct tfs *fs, struct tfs_statfs *out);

/* Cleans up after a member whose current epoch is past 'dead_epoch' or that is DEAD: repeats or forgets its transactions, frees
 * what has its tag, drops its open and map bits, frees orphans. Idempotent; any member may call it. */
int tfs_recover(struct tfs *fs, tmb_u32 member);
/* Recovers every member slot that needs it; call at mount and on TMB_PENDING_MEMBERS. */
int tfs_recover_all(struct tfs *fs);

/* For the host: what the member makes from now on, also if it is there already, counts for the account of this name (1 to 31 bytes), whose
 * limits become these (0: none); at its next opening it is confined to the directory 'root' (0: it is not). A member with no grant has neither.
 * -ENOSPC: all accounts are taken. One call at a time. */
int tfs_grant(struct tfs *fs, tmb_u32 member, const char *name, tmb_u32 len, tmb_u64 blocks, tmb_u64 inodes, tmb_u64 root);

/* For snapshots: stops all changes by other members until the thaw, or this member's end; a hole is not filled, nothing is mapped. -EBUSY:
 * another member has frozen it, or one does not let go of a mapping. */
int tfs_freeze(struct tfs *fs);
void tfs_thaw(struct tfs *fs);
/* Whether another living member has frozen it. */
bool tfs_frozen(struct tfs *fs);

/* --- inodes --------------------------------------------------------------------------------------------- */

struct tfs_attr {
	tmb_u64 ino, size, blocks, version, rdev;
	tmb_u32 generation, mode, uid, gid, nlink, flags;
	tmb_s64 atime, mtime, ctime, btime;
	bool has_xattr;
};
int tfs_getattr(struct tfs *fs, struct tfs_handle h, struct tfs_attr *out);
/* Whether tfs_getattr would give what it gave before. Cheaper; false where in doubt. */
bool tfs_attr_same(struct tfs *fs, const struct tfs_attr *before);

#define TFS_SET_MODE 1u
#define TFS_SET_OWNER 2u /* uid and gid together */
#define TFS_SET_ATIME 4u
#define TFS_SET_MTIME 8u
#define TFS_SET_CTIME 16u /* else now */
#define TFS_SET_FLAGS 32u
#define TFS_SET_UID 64u
#define TFS_SET_GID 128u
int tfs_setattr(struct tfs *fs, struct tfs_handle h, tmb_u32 what, const struct tfs_attr *attr);
/* Lazy, lock-free time update of a read. */
int tfs_touch_atime(struct tfs *fs, struct tfs_handle h, tmb_s64 now);

/* Keeps an inode's contents alive after its last unlink, until closed. The skin counts: call open at 0 -> 1, close at
 * 1 -> 0. close frees an unlinked inode when nobody else has it open. -ESTALE: already gone. */
int tfs_open_ref(struct tfs *fs, struct tfs_handle h);
int tfs_close_ref(struct tfs *fs, struct tfs_handle h);
/* The same for mappings of an inode's blocks: set before the first block is mapped; cleared when none is mapped or pinned. -EAGAIN: frozen,
 * nap and try again. */
int tfs_map_ref(struct tfs *fs, struct tfs_handle h);
int tfs_unmap_ref(struct tfs *fs, struct tfs_handle h);
/* Besides tfs_map_ref, before zeroes are mapped where tfs_map finds a hole when it is asked again after this: whoever fills a hole then waits until
 * they are taken back. Cleared by tfs_unmap_ref. */
int tfs_hole_ref(struct tfs *fs, struct tfs_handle h);
/* Grows when blocks were taken away from the inode: compare on TMB_PENDING_REVOKE. */
tmb_u64 tfs_map_seq(struct tfs *fs, tmb_u64 ino);

/* The inode's lock across members. Excludes writers and truncation. Not recursive; in one member, one thread at a time
 * should ask (hold the VFS lock first). -EUCLEAN or -ESTALE: bad inode; then it's not held. */
int tfs_lock_inode(struct tfs *fs, struct tfs_handle h);
void tfs_unlock_inode(struct tfs *fs, tmb_u64 ino);

/* --- names ---------------------------------------------------------------------------------------------- */

/* 'type' gets DT_*. "." and ".." are not names here. -ENOENT, -ENAMETOOLONG. */
int tfs_lookup(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 len, struct tfs_handle *found, tmb_u8 *type);
/* Even and unchanged: the directory's names are what they were when this value was read. Odd: being changed. */
tmb_u64 tfs_dir_seq(struct tfs *fs, struct tfs_handle dir);
tmb_u64 tfs_parent(struct tfs *fs, struct tfs_handle dir); /* 0: damaged */

struct tfs_create {
	tmb_u32 mode; /* with S_IFMT */
	tmb_u32 uid, gid;
	tmb_u64 rdev;	      /* major << 20 | minor */
	const char *symlink;  /* target for S_IFLNK */
	tmb_u32 symlink_len;
	const void *xattrs;   /* attributes that must be there from the start (ACLs, labels): struct tfs_xattr_image, or NULL */
	tmb_u32 xattrs_len;
	bool open;	      /* also take the opener's reference (O_CREAT, O_TMPFILE) */
	tmb_s64 now;
};
/* name NULL: O_TMPFILE (nlink 0; c->open must be set). -EEXIST, -ENOSPC, -EDQUOT, -ENOENT (directory was removed) … */
int tfs_create(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 len, const struct tfs_create *c, struct tfs_handle *made);
int tfs_link(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 len, struct tfs_handle h, tmb_s64 now);
/* expect: the inode the caller checked, number 0: any; -ESTALE when the name means another one by now. */
int tfs_unlink(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 len, struct tfs_handle expect, tmb_s64 now);
int tfs_rmdir(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 len, struct tfs_handle expect, tmb_s64 now);
#define TFS_RENAME_NOREPLACE 1u
#define TFS_RENAME_EXCHANGE 2u
#define TFS_RENAME_WHITEOUT 4u /* leaves a 0:0 character device at the old name */
/* One of the two names of a rename. expect: as for tfs_unlink; for the new name, TFS_NOTHING: it must be free. */
struct tfs_name {
	struct tfs_handle dir;
	const char *name;
	tmb_u32 len;
	struct tfs_handle expect;
};
#define TFS_NOTHING (1ULL << 62) /* in place of a number */
int tfs_rename(struct tfs *fs, const struct tfs_name *from, const struct tfs_name *to, tmb_u32 flags, tmb_s64 now);

/* Calls emit for each name from *pos on (0: the first; "." and ".." are the skin's); emit returns false to stop. *pos is left at the
 * first name not taken. */
typedef bool (*tfs_emit)(void *ctx, const char *name, tmb_u32 len, tmb_u64 ino, tmb_u8 type, tmb_u64 next_pos);
int tfs_readdir(struct tfs *fs, struct tfs_handle dir, tmb_u64 *pos, tfs_emit emit, void *ctx);
/* Copies up to size bytes, returns the length. */
int tfs_readlink(struct tfs *fs, struct tfs_handle h, char *buf, tmb_u32 size);

/* --- data ----------------------------------------------------------------------------------------------- */

/*
 * A pin says that this member is copying blocks of an inode that it has open; blocks taken away meanwhile are not reused before it's gone. Never
 * sleep for long with one. TFS_PINS: there is none, since the member may not write, or because all are taken. The return value goes to unpin.
 */
tmb_u32 tfs_pin(struct tfs *fs, tmb_u64 ino);
void tfs_unpin(struct tfs *fs, tmb_u32 pin);
/* Equal before tfs_map and after a copy: no block was taken away in between. */
tmb_u64 tfs_read_stamp(struct tfs *fs, tmb_u64 ino);
/* Around tfs_map and the copy of every read without a lock: a pin, or where there is none, a stamp. */
struct tfs_look {
	tmb_u64 ino, stamp;
	tmb_u32 pin;
};
static inline struct tfs_look tfs_look_begin(struct tfs *fs, tmb_u64 ino)
{
	struct tfs_look look = {.ino = ino, .pin = tfs_pin(fs, ino)};

	if (look.pin == TFS_PINS)
		look.stamp = tfs_read_stamp(fs, ino);
	return look;
}
/* False: what was copied may be another file's; look again, at most TFS_READ_TRIES times. */
static inline bool tfs_look_end(struct tfs *fs, const struct tfs_look *look)
{
	if (look->pin == TFS_PINS)
		return tfs_read_stamp(fs, look->ino) == look->stamp;
	tfs_unpin(fs, look->pin);
	return true;
}
#define TFS_READ_TRIES 1000u

struct tfs_run {
	tmb_u64 block; /* first block of the area, 0: hole */
	tmb_u64 count; /* blocks, >= 1, as many as asked at most */
};
/* What lies at file block 'fblock': a run of contiguous blocks, or of hole. Does not look at the size. */
int tfs_map(struct tfs *fs, struct tfs_handle h, tmb_u64 fblock, tmb_u64 count, struct tfs_run *run);
/* Address of a block; 0 <= block < fs->blocks was checked by tfs_map. */
static inline void *tfs_block(struct tfs *fs, tmb_u64 block)
{
	return fs->area + (block << TFS_BLOCK_SHIFT);
}
tmb_u64 tfs_size(struct tfs *fs, struct tfs_handle h); /* bytes, <= TFS_MAX_SIZE */

/*
 * A write: tfs_write_begin takes what it needs of a transaction, and then the inode's lock. With it:
 *	for each piece: tfs_write_map(…, &run, &is_new) ; copy into the run ; tfs_write_done(…)
 * tfs_write_map gives existing blocks, or new ones (tagged, not yet linked; not zeroed: the copier fills all of them, or zeroes what it doesn't
 * fill); tfs_write_done links new blocks (all of run, even if less was copied). Then tfs_write_end sets size and times, and the
 * inode is unlocked. Before a write beyond the size: tfs_extend_zero. While the file system is frozen tfs_write_begin waits.
 */
struct tfs_write {
	struct tfs_handle h;
	tmb_u32 slot;  /* of the transaction */
	bool started;  /* it names the inode; a write in place needs none */
	bool is_new;
	struct tfs_run run;
	tmb_u64 fblock;
};
int tfs_write_begin(struct tfs *fs, struct tfs_handle h, struct tfs_write *w);
int tfs_write_map_locked(struct tfs *fs, struct tfs_write *w, tmb_u64 fblock, tmb_u64 count);
int tfs_write_done_locked(struct tfs *fs, struct tfs_write *w);
/* end: file offset after the last byte written (0: nothing written). Raises the size to it, stamps mtime and ctime, takes S_ISUID and
 * S_ISGID away if kill_suid, ends the transaction. Must follow begin in any case. */
int tfs_write_end_locked(struct tfs *fs, struct tfs_write *w, tmb_u64 end, bool kill_suid, tmb_s64 now);
/* Zeroes from the present size to the end of its block, so that a larger size exposes no old bytes. */
int tfs_extend_zero_locked(struct tfs *fs, struct tfs_handle h);
/*
 * Page fault on a hole: allocates one zeroed block, or 512 where count and alignment allow it (or finds what came meanwhile). -ENXIO:
 * beyond the end. -EAGAIN: another member is changing the inode and may be waiting for this member to unmap it: let go of
 * what the revoke worker needs (the mapping's invalidate lock), call tfs_wait_inode(), try again.
 */
int tfs_fault_block(struct tfs *fs, struct tfs_handle h, tmb_u64 fblock, tmb_u64 count, struct tfs_run *run);

int tfs_wait_inode(struct tfs *fs, struct tfs_handle h);

/* Whole calls for skins that copy with memcpy (FUSE, tests): a pread/pwrite of plain memory. append: offset is ignored, the data
 * goes to the end, *offset gets where. */
tmb_s64 tfs_pread(struct tfs *fs, struct tfs_handle h, void *buf, tmb_u64 len, tmb_u64 offset);
tmb_s64 tfs_pwrite(struct tfs *fs, struct tfs_handle h, const void *buf, tmb_u64 len, tmb_u64 *offset, bool append, bool kill_suid, tmb_s64 now);

/* Size change. Blocks beyond it are freed once no member reads, maps or pins them. Takes the inode's lock. */
int tfs_truncate(struct tfs *fs, struct tfs_handle h, tmb_u64 size, bool kill_suid, tmb_s64 now);
#define TFS_FALLOC_KEEP_SIZE 1u
#define TFS_FALLOC_PUNCH 2u
#define TFS_FALLOC_ZERO 4u
int tfs_fallocate(struct tfs *fs, struct tfs_handle h, tmb_u32 mode, tmb_u64 offset, tmb_u64 len, tmb_s64 now);
/* Next data (hole = false) or hole at or after offset; -ENXIO beyond the end. */
tmb_s64 tfs_seek(struct tfs *fs, struct tfs_handle h, tmb_u64 offset, bool hole);

/* --- file locks: flock and fcntl, across members -------------------------------------------------------------- */

struct tfs_file_lock {
	tmb_u64 owner;	    /* unique within this member among those that exclude each other: a process, an open file description */
	tmb_u64 start, end; /* bytes, end inclusive, ~0: to the end */
	tmb_u32 type;	    /* TFS_LK_READ, _WRITE, _UNLOCK */
	tmb_u32 kind;	    /* TFS_LK_POSIX, _FLOCK */
	tmb_u32 pid;	    /* what F_GETLK shows */
	tmb_u32 member;	    /* tfs_get_lock: who has it */
};
/* Takes, changes or gives back; -EAGAIN: another owner has it. Giving back rings the members that wait. A flock that would become another
 * one is given back first, also where the answer is -EAGAIN. */
int tfs_set_lock(struct tfs *fs, struct tfs_handle h, const struct tfs_file_lock *lock);
/* Who is in the way: fills 'lock' with one, or makes its type TFS_LK_UNLOCK. */
int tfs_get_lock(struct tfs *fs, struct tfs_handle h, struct tfs_file_lock *lock);
/*
 * Waiting: after -EAGAIN call tfs_lock_wait_begin once (a slot, or -EDEADLK for a POSIX lock whose holder waits for this owner); then
 * repeat { tfs_set_lock ; if -EAGAIN sleep until TMB_PENDING_LOCK or TMB_PENDING_MEMBERS arrives, at most a second }; then tfs_lock_wait_end.
 * The slot TFS_LOCK_WAITS is none: of more than so many waiters of a member at once, the further ones aren't seen by others that look for
 * deadlocks; these ask for a slot again each time they looked in vain.
 */
int tfs_lock_wait_begin(struct tfs *fs, struct tfs_handle h, const struct tfs_file_lock *lock);
void tfs_lock_wait_end(struct tfs *fs, int slot);

/* --- change events ----------------------------------------------------------------------------------------------- */

struct tfs_change {
	tmb_u64 ino, dir; /* dir 0: not known, then there is no name */
	tmb_u32 mask;	  /* IN_*, as inotify(7) has them; with IN_ISDIR */
	tmb_u32 cookie;	  /* ties IN_MOVED_FROM to IN_MOVED_TO */
	tmb_u32 member;	  /* heard: who did it */
	tmb_u32 name_len;
	char name[TFS_NAME_MAX + 1];
};
/* Whether another member wants to hear of changes: one load. Ask before making up what to tell. */
bool tfs_change_wanted(struct tfs *fs);
/* Tells the watchers. One thread of a member at a time: the skin has a lock for it. Returns where the record ends. */
tmb_u64 tfs_change_post(struct tfs *fs, const struct tfs_change *c);
/* Whether no watcher has heard the record that ends there: then the same need not be told again. Call it after what it tells of. */
bool tfs_change_unheard(struct tfs *fs, tmb_u64 end);

struct tfs_listener {
	tmb_u64 at[TFS_MEMBERS];
	tmb_u32 from; /* whose ring comes next */
};
/* From now on changes of other members are told to this one: TMB_PENDING_EVENT, and its doorbell. -EROFS for a read-only member. */
int tfs_listen_begin(struct tfs *fs, struct tfs_listener *l);
void tfs_listen_end(struct tfs *fs);
/* 1: the next change; 0: none now; -EOVERFLOW: some of a member's were lost, ask again for those that follow. */
int tfs_listen_next(struct tfs *fs, struct tfs_listener *l, struct tfs_change *c);

/* --- extended attributes (full names, "user.x") ---------------------------------------------------------- */

/* size 0: only the length. -ENODATA, -ERANGE. */
tmb_s64 tfs_xattr_get(struct tfs *fs, struct tfs_handle h, const char *name, void *value, tmb_u64 size);
/* Names, each with its NUL. */
tmb_s64 tfs_xattr_list(struct tfs *fs, struct tfs_handle h, char *list, tmb_u64 size);
#define TFS_XATTR_CREATE 1u
#define TFS_XATTR_REPLACE 2u
/* value NULL: remove. mode: when >= 0 the inode's permission bits become it in the same transaction (ACLs). */
int tfs_xattr_set(struct tfs *fs, struct tfs_handle h, const char *name, const void *value, tmb_u64 size, tmb_u32 flags, int mode,
		  tmb_s64 now);

#endif
