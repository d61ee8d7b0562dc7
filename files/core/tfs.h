/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The file system's logic, freestanding. The kernel module, the FUSE mount, mkfs, fsck, tests and fuzzers compile it.
 *
 * Conventions: functions return 0 or a count, or a negative errno (-EUCLEAN: the zone's memory is damaged; -ESTALE: the handle's inode was freed).
 * Handles name inodes across members. Numbers from zone memory are copied, checked, then used; walks are bounded. Functions take the locks that
 * they need; the caller of a _locked one holds tfs_lock_inode(). No function checks permissions: the skins do, before the call. Times are stamped
 * here.
 *
 * Readers (lookup, readdir, getattr, map, xattr get) take no lock and write no shared line.
 */
#ifndef TFS_H
#define TFS_H

#include "tfs_format.h"
#include "tfs_os.h"

#define TFS_ITABLE_CACHE 128u
#define TFS_BIT_LOCKS 16u
#define TFS_QUEUE 64u /* threads of one member that can queue for locks */

/*
 * Names one inode for its whole life. A freed inode's number may be used again, so every function that reads or changes an inode compares the
 * generation; writers do so under the inode's lock. Generation 0 means the number's present inode: for callers that know that it can't be freed
 * (alone with the file system, or told the number by the host).
 */
struct tfs_handle {
	tmb_u64 ino;
	tmb_u32 generation;
};

/* A thread that waits for a lock. */
struct tfs_waiter {
	tmb_u64 lock;	/* the lock's id; 0: free */
	tmb_u64 number; /* the order of arrival */
	tmb_u32 bell, pad; /* counts wake-ups; the thread sleeps on it */
};

/* Members that let a wait run out, a bit for each, with a count of each at that time: while its count is the same, it is not waited for in full again. */
struct tfs_slow {
	tmb_u64 members;
	tmb_u32 counts[TFS_MEMBERS];
};

struct tfs {
	tmb_u8 *area;	  /* the FILES area in this address space */
	tmb_u64 blocks;	  /* checked copies of super block fields */
	tmb_u64 member_start, map_start, data_start, hash_seed;
	struct tmb_member *members; /* the zone's member table, 64 slots; NULL: alone (mkfs, fsck, unit tests) */
	tmb_u32 member;	  /* own id */
	tmb_u32 epoch;	  /* own epoch */
	const tmb_u64 *state_epoch; /* in its slot, if it may write; NULL: read-only, or alone */
	tmb_u64 active;	  /* what is there until it leaves or is declared dead */
	struct tfs_handle root; /* the member's root directory */
	bool read_only;
	bool persistent; /* TFS_RO_COMPAT_PERSISTENT */
	bool keyed;	 /* TFS_INCOMPAT_KEYED_HASH */
	bool unclean;	 /* this member left work to its recovery */
	bool asked;	 /* another thread has cleared TMB_PENDING_REVOKE since tfs_revoke */
	tmb_u32 taking;	 /* so many threads may be clearing it now */
	tmb_u64 freeze_seen, freeze_since; /* freeze.c: another member's freeze as it was last seen, and since when it is that; 'freeze_looking' guards both */
	tmb_u32 freeze_looking, freeze_tag; /* the latter: of this member's last freeze */
	tmb_u64 alloc_cursor, chunk_cursor, inode_cursor; /* hints, racy on purpose */
	tmb_u64 reserve[2]; /* where the reserved blocks were when this member last looked; hints */
	tmb_u8 freeing[TFS_TX_SLOTS]; /* how many inodes the transaction in each slot has freed */
	tmb_u32 recovery_lock; /* held by the thread of this member that uses the transaction slot TFS_TX_RECOVERY */
	tmb_u64 itable_cache[TFS_ITABLE_CACHE]; /* where blocks of the inode table lie: (its block + 1) << 32 | the area's; they never move */
	tmb_u32 bit_locks[TFS_BIT_LOCKS]; /* by inode number: locks of the member's own bits in 'openers' and 'mappers' */
	struct tfs_slow silent; /* those that do not answer, and how often they had begun to revoke ('revokes_begun') */
	struct tfs_slow keeping; /* those that answer, but map pages that are in use, and how often they had ended that ('revokes_done') */
	struct tfs_waiter queue[TFS_QUEUE]; /* wait.c */
	tmb_u64 numbers;
	void *os;	  /* the skin's */
};

/* --- a file system as a whole ------------------------------------------------------------------------- */

/* Writes an inode's data back where the memory is persistent, also what was stored through mappings. */
int tfs_sync(struct tfs *fs, struct tfs_handle h);

/* Makes an empty file system over whatever the area holds, with ro_compat features (TFS_RO_COMPAT_PERSISTENT). The root directory belongs to
 * uid:gid with 'mode'. uuid: 16 bytes. */
int tfs_mkfs(void *area, tmb_u64 length, const tmb_u8 *uuid, const char *label, tmb_u64 hash_seed, tmb_u64 area_offset,
	     tmb_u32 uid, tmb_u32 gid, tmb_u32 mode, tmb_u64 ro_compat);
/* Checks the super block and fills 'fs', in which the caller has set read_only and os. Recovers this member's former epochs. -EINVAL: no file
 * system here; -EPROTONOSUPPORT: another version or unknown features; -EUCLEAN: damaged. members may be NULL. */
int tfs_open(struct tfs *fs, void *area, tmb_u64 length, struct tmb_member *members, tmb_u32 member, tmb_u32 epoch);

/*
 * A member that maps files calls tfs_revoke after it has cleared TMB_PENDING_REVOKE in its own 'pending', takes back every mapping of an inode
 * whose tfs_map_seq has changed since the mapping, then calls tfs_revoked. If a mapping can't be taken back, it sets the bit again instead.
 */
void tfs_revoke(struct tfs *fs);
/* Called when every mapping that was stale when TMB_PENDING_REVOKE was cleared is gone: blocks deferred for them become free. True: one of this member's
 * readers has not finished, another member has the lock of the deferred blocks, or this one was asked once more; the caller calls both again after a
 * while. */
bool tfs_revoked(struct tfs *fs);
/* Around the clearing of pending bits by another thread than that which calls tfs_revoke and tfs_revoked, which may be between the two. taken: the bits;
 * after TMB_PENDING_REVOKE, the thread has tfs_revoke called. */
void tfs_take_begin(struct tfs *fs);
void tfs_take_end(struct tfs *fs, tmb_u64 taken);

/* Called when this member's doorbell rang: threads that wait for a lock look again. */
void tfs_rang(struct tfs *fs);

/* Ends this member's use of the file system; the caller has dropped all references. */
void tfs_close(struct tfs *fs);

struct tfs_statfs {
	tmb_u64 blocks, blocks_free, inodes, inodes_free;
};
void tfs_statfs(struct tfs *fs, struct tfs_statfs *out);

/* Recovers a member that is DEAD, or its former epochs: repeats or discards its transactions, frees the blocks with its tag, clears its open and
 * map bits, frees orphans. Idempotent; any member may call it. */
int tfs_recover(struct tfs *fs, tmb_u32 member);
/* Recovers every member slot that needs it. Called at mount and on TMB_PENDING_MEMBERS. */
int tfs_recover_all(struct tfs *fs);

/* For the host: what the member creates from now on, also if it is active, counts for the account of this name (1 to 31 bytes), whose limits become
 * these (0: none). From its next opening on it is confined to the directory 'root' (number 0: it is not). A member without a grant has neither. -ENOSPC:
 * all accounts are taken. The caller allows one call at a time. */
int tfs_grant(struct tfs *fs, tmb_u32 member, const char *name, tmb_u32 len, tmb_u64 blocks, tmb_u64 inodes, struct tfs_handle root);

/* Returns whether this member may write and was declared dead. Others wait for its readers no longer, and its slot, with all bits and counters of the
 * slot, may be another's. */
static inline bool tfs_expelled(const struct tfs *fs)
{
	return fs->state_epoch && tmb_load(fs->state_epoch) != fs->active;
}

/* For snapshots: stops all changes by other members until the thaw or this member's death. Meanwhile no hole is filled and nothing is mapped.
 * -EBUSY: another member has frozen it, or one does not revoke a mapping. -ESTALE, of all three: others have ended the freeze, since it was not renewed
 * for a minute. */
int tfs_freeze(struct tfs *fs);
int tfs_renew_freeze(struct tfs *fs);
int tfs_thaw(struct tfs *fs);
/* Returns whether another living member has frozen the file system. */
bool tfs_frozen(struct tfs *fs);

/* --- inodes --------------------------------------------------------------------------------------------- */

struct tfs_attr {
	tmb_u64 ino, size, blocks, version, rdev;
	tmb_u32 generation, mode, uid, gid, nlink, flags;
	tmb_s64 atime, mtime, ctime, btime;
	bool has_xattr;
};
int tfs_getattr(struct tfs *fs, struct tfs_handle h, struct tfs_attr *out);
/* Returns whether the zone has the handle's inode. For handles from outside the zone, whose numbers may be any: others that aren't there are damage. */
bool tfs_exists(struct tfs *fs, struct tfs_handle h);
/* Returns whether tfs_getattr would give the same again. Cheaper than it; false in doubt. */
bool tfs_attr_same(struct tfs *fs, const struct tfs_attr *before);

#define TFS_SET_MODE 1u
#define TFS_SET_OWNER 2u /* uid and gid together */
#define TFS_SET_ATIME 4u
#define TFS_SET_MTIME 8u
#define TFS_SET_CTIME 16u /* else now */
#define TFS_SET_FLAGS 32u
#define TFS_SET_UID 64u
#define TFS_SET_GID 128u
#define TFS_KILL_SET_ID 256u /* clears S_ISUID, and S_ISGID of what its group may execute, as it is then; not with TFS_SET_MODE */
#define TFS_KILL_SGID 512u   /* clears S_ISGID in any case */
/* checked: the attributes by which the caller checked its right to the change; NULL: it needs none. -EAGAIN: the inode has another owner or other flags
 * by now, and is not changed; the caller checks again. TFS_SET_MODE changes the access ACL, too, so that both agree. */
int tfs_setattr(struct tfs *fs, struct tfs_handle h, tmb_u32 what, const struct tfs_attr *attr, const struct tfs_attr *checked);
/* Updates the access time after a read, without a lock. */
int tfs_touch_atime(struct tfs *fs, struct tfs_handle h, tmb_s64 now);

/* Keeps an inode's contents after its last unlink, until it is closed. The skin counts and calls open at 0 -> 1, close at 1 -> 0. close frees an
 * unlinked inode that no other member has open. -ESTALE: already freed. */
int tfs_open_ref(struct tfs *fs, struct tfs_handle h);
int tfs_close_ref(struct tfs *fs, struct tfs_handle h);
/* Both in halves, for a skin that calls the first half with a lock of its own held: that waits for nobody. After tfs_close_bit, and after an error of
 * tfs_open_bit, it calls tfs_free_unused, which may wait for another member's lock. */
int tfs_open_bit(struct tfs *fs, struct tfs_handle h);
void tfs_close_bit(struct tfs *fs, struct tfs_handle h);
int tfs_free_unused(struct tfs *fs, struct tfs_handle h);
/* The same for mappings of an inode's blocks. The skin sets it before the first block is mapped and clears it when none is mapped or pinned.
 * -EAGAIN: frozen, sleep and try again. */
int tfs_map_ref(struct tfs *fs, struct tfs_handle h);
int tfs_unmap_ref(struct tfs *fs, struct tfs_handle h);
/* Called after tfs_map_ref, before zeroes are mapped for a hole; the caller then calls tfs_map again. A member that fills a hole waits until the
 * zeroes are taken back. Cleared by tfs_unmap_ref. */
int tfs_hole_ref(struct tfs *fs, struct tfs_handle h);
/* Grows when blocks were unlinked from the inode: compare on TMB_PENDING_REVOKE. */
tmb_u64 tfs_map_seq(struct tfs *fs, tmb_u64 ino);

/* The inode's lock across members. Excludes writers and truncation. Not recursive; in one member, one thread at a time should ask (hold the VFS
 * lock first). -EUCLEAN or -ESTALE: bad inode, and the lock is not held. */
int tfs_lock_inode(struct tfs *fs, struct tfs_handle h);
void tfs_unlock_inode(struct tfs *fs, tmb_u64 ino);

/* --- names ---------------------------------------------------------------------------------------------- */

/* 'type' gets DT_*. "." and ".." are not names here. -ENOENT, -ENAMETOOLONG. */
int tfs_lookup(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 len, struct tfs_handle *found, tmb_u8 *type);
/* Even and unchanged: the directory's names are the same as when this value was read. Odd: they are being changed. */
tmb_u64 tfs_dir_seq(struct tfs *fs, struct tfs_handle dir);
tmb_u64 tfs_parent(struct tfs *fs, struct tfs_handle dir); /* 0: damaged */

struct tfs_create {
	tmb_u32 mode; /* with S_IFMT */
	tmb_u32 uid, gid;
	tmb_u64 rdev;	      /* major << 20 | minor */
	const char *symlink;  /* target for S_IFLNK */
	tmb_u32 symlink_len;
	const void *xattrs;   /* attributes that the inode has from the start (ACLs, labels): struct tfs_xattr_image, or NULL */
	tmb_u32 xattrs_len;
	bool open;	      /* also takes the opener's reference (O_CREAT, O_TMPFILE) */
	tmb_s64 now;
};
/* name NULL: O_TMPFILE (nlink 0; c->open must be set). -EEXIST, -ENOSPC, -EDQUOT, -ENOENT (directory was removed) … */
int tfs_create(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 len, const struct tfs_create *c, struct tfs_handle *made);
int tfs_link(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 len, struct tfs_handle h, tmb_s64 now);
/* expect: the inode that the caller checked, number 0: any; -ESTALE if the name now means another one. */
int tfs_unlink(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 len, struct tfs_handle expect, tmb_s64 now);
int tfs_rmdir(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 len, struct tfs_handle expect, tmb_s64 now);
#define TFS_RENAME_NOREPLACE 1u
#define TFS_RENAME_EXCHANGE 2u
#define TFS_RENAME_WHITEOUT 4u /* leaves a 0:0 character device at the old name */
/* One of the two names of a rename. expect: as for tfs_unlink; TFS_NOTHING for the new name: it must be free. */
struct tfs_name {
	struct tfs_handle dir;
	const char *name;
	tmb_u32 len;
	struct tfs_handle expect;
};
#define TFS_NOTHING (1ULL << 62) /* in place of a number */
int tfs_rename(struct tfs *fs, const struct tfs_name *from, const struct tfs_name *to, tmb_u32 flags, tmb_s64 now);

/* Calls emit for each name from *pos on (0: the first; the skin adds "." and ".."); emit returns false to stop. *pos then is the position of the
 * first name that emit refused. */
typedef bool (*tfs_emit)(void *ctx, const char *name, tmb_u32 len, tmb_u64 ino, tmb_u8 type, tmb_u64 next_pos);
int tfs_readdir(struct tfs *fs, struct tfs_handle dir, tmb_u64 *pos, tfs_emit emit, void *ctx);
/* Copies up to size bytes, returns the length. */
int tfs_readlink(struct tfs *fs, struct tfs_handle h, char *buf, tmb_u32 size);

/* --- data ----------------------------------------------------------------------------------------------- */

/*
 * A pin tells other members that this one copies blocks of an inode that it has open; blocks unlinked meanwhile are not reused before the unpin. A
 * caller does not sleep for long with a pin. Returns TFS_PINS if there is no pin: the member may not write, or all pins are taken. tfs_unpin takes
 * the value.
 */
tmb_u32 tfs_pin(struct tfs *fs, tmb_u64 ino);
void tfs_unpin(struct tfs *fs, tmb_u32 pin);
/* Under a pin, after a copy of n bytes from file offset 'at' on: returns how many of them were the file's, as it may have been cut since the caller
 * loaded its size. -ESTALE, -ESHUTDOWN. */
tmb_s64 tfs_still_there(struct tfs *fs, struct tfs_handle h, tmb_u64 at, tmb_u64 n);

struct tfs_run {
	tmb_u64 block; /* first block of the area, 0: hole */
	tmb_u64 count; /* blocks, >= 1, as many as asked at most */
};

/* A step of a read without a lock. */
struct tfs_look {
	struct tfs_run run;
	/* of the core */
	struct tfs_handle h;
	struct tfs_inode *inode;
	tmb_u64 stamp;
	tmb_u32 pin;
};
/* Finds where the file's bytes from 'at' on lie, n of them at most: look->run begins with the block of 'at'. Returns how many bytes the caller may copy from
 * it; 0: the file ends there. If not 0, tfs_look_end follows. -ESTALE, -ESHUTDOWN, -EUCLEAN, -EBUSY. */
tmb_s64 tfs_look_begin(struct tfs *fs, struct tfs_handle h, tmb_u64 at, tmb_u64 n, struct tfs_look *look);
/* After a copy of n bytes: returns how many of them were the file's, which another member may have cut meanwhile. -EAGAIN: the copy may hold another file's
 * bytes; look again, at most TFS_READ_TRIES times. -ESTALE, -ESHUTDOWN. */
tmb_s64 tfs_look_end(struct tfs *fs, const struct tfs_look *look, tmb_u64 at, tmb_u64 n);
#define TFS_READ_TRIES 1000u

/* Gives the run at file block 'fblock': contiguous blocks, or a hole. Does not look at the size. */
int tfs_map(struct tfs *fs, struct tfs_handle h, tmb_u64 fblock, tmb_u64 count, struct tfs_run *run);
/* Address of a block; tfs_map has checked 0 <= block < fs->blocks. */
static inline void *tfs_block(struct tfs *fs, tmb_u64 block)
{
	return fs->area + (block << TFS_BLOCK_SHIFT);
}
tmb_u64 tfs_size(struct tfs *fs, struct tfs_handle h); /* bytes, <= TFS_MAX_SIZE */

/*
 * A write: tfs_write_begin takes a transaction slot, then the inode's lock. Then for each piece: tfs_write_map(…, &run, &is_new); copy into the
 * run; tfs_write_done(…). tfs_write_map gives existing blocks, or new ones that are tagged, not yet linked, and not zeroed: the copier fills or
 * zeroes all of them. tfs_write_done links new blocks (all of run, even if less was copied). Then tfs_write_end sets size and times, and the caller
 * unlocks the inode. A write beyond the size calls tfs_extend_zero first. While the file system is frozen tfs_write_begin waits.
 */
struct tfs_write {
	struct tfs_handle h;
	struct tfs_inode *inode; /* the handle's, which is locked; records never move */
	tmb_u32 slot;  /* of the transaction */
	bool started;  /* it names the inode; a write in place needs no transaction */
	bool is_new;
	struct tfs_run run;
	tmb_u64 fblock;
	tmb_u64 added_from, added_to; /* the last blocks in a row that it has added to the file */
};
int tfs_write_begin(struct tfs *fs, struct tfs_handle h, struct tfs_write *w);
int tfs_write_map_locked(struct tfs *fs, struct tfs_write *w, tmb_u64 fblock, tmb_u64 count);
int tfs_write_done_locked(struct tfs *fs, struct tfs_write *w);
/* end: file offset after the last byte written (0: nothing written). Raises the size to it, stamps mtime and ctime, clears S_ISUID and S_ISGID if
 * kill_suid, ends the transaction. The caller calls it after every begin. */
int tfs_write_end_locked(struct tfs *fs, struct tfs_write *w, tmb_u64 end, bool kill_suid, tmb_s64 now);
/* Called before tfs_write_end_locked with the same 'end': frees the blocks that this write has added behind it, if it was cut short. */
void tfs_write_trim_locked(struct tfs *fs, struct tfs_write *w, tmb_u64 end);
/* Zeroes what blocks have from the present size to the end of its block, or to 'to' if that lies further on, so that a larger size exposes no old bytes.
 * to: where the write begins. */
int tfs_extend_zero_locked(struct tfs *fs, struct tfs_handle h, tmb_u64 to);
/*
 * Page fault on a hole: allocates one zeroed block, or 512 if count and alignment allow it, or finds the blocks that another member has put there.
 * -ENXIO: beyond the end. -EAGAIN: another member is changing the inode and may be waiting for this one to unmap it; the caller releases the locks
 * that the revoke worker needs (the mapping's invalidate lock), calls tfs_wait_inode() and tries again.
 */
int tfs_fault_block(struct tfs *fs, struct tfs_handle h, tmb_u64 fblock, tmb_u64 count, struct tfs_run *run);

int tfs_wait_inode(struct tfs *fs, struct tfs_handle h);

/* Whole calls for skins that copy with memcpy (FUSE, tests): a pread or pwrite of plain memory. append: writes at the end, and *offset gets the
 * position. */
tmb_s64 tfs_pread(struct tfs *fs, struct tfs_handle h, void *buf, tmb_u64 len, tmb_u64 offset);
tmb_s64 tfs_pwrite(struct tfs *fs, struct tfs_handle h, const void *buf, tmb_u64 len, tmb_u64 *offset, bool append, bool kill_suid, tmb_s64 now);

/* Changes the size. Blocks beyond it are freed once no member reads, maps or pins them. Takes the inode's lock. */
int tfs_truncate(struct tfs *fs, struct tfs_handle h, tmb_u64 size, bool kill_suid, tmb_s64 now);
/* The same, and TFS_FALLOC_PUNCH of [offset, end), between tfs_write_begin and tfs_unlock_inode; they end the transaction. So the caller can take locks of
 * its own once it has waited for the inode's. They wait for other members only as long as TFS_REVOKE_LIMIT_NS. */
int tfs_truncate_locked(struct tfs *fs, struct tfs_write *w, tmb_u64 size, bool kill_suid, tmb_s64 now);
int tfs_punch_locked(struct tfs *fs, struct tfs_write *w, tmb_u64 offset, tmb_u64 end, tmb_s64 now);
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
	tmb_u32 member;	    /* tfs_get_lock: the member that holds it */
};
/* Takes, changes or releases a lock; -EAGAIN: another owner has it. A release rings the members that wait. A flock that changes its type is
 * released first, also if the answer is -EAGAIN. */
int tfs_set_lock(struct tfs *fs, struct tfs_handle h, const struct tfs_file_lock *lock);
/* Fills 'lock' with a conflicting one; type TFS_LK_UNLOCK: there is none. */
int tfs_get_lock(struct tfs *fs, struct tfs_handle h, struct tfs_file_lock *lock);
/*
 * Waiting: after -EAGAIN the caller calls tfs_lock_wait_begin once, which gives a slot, or -EDEADLK for a POSIX lock whose holder waits for this
 * owner. It then repeats tfs_set_lock and, after -EAGAIN, sleeps until TMB_PENDING_LOCK or TMB_PENDING_MEMBERS arrives, at most a second. At last
 * it calls tfs_lock_wait_end. Slot TFS_LOCK_WAITS means that all slots of the member are taken: other members that look for deadlocks don't see
 * this waiter, so it asks for a slot again after each -EAGAIN.
 */
int tfs_lock_wait_begin(struct tfs *fs, struct tfs_handle h, const struct tfs_file_lock *lock);
void tfs_lock_wait_end(struct tfs *fs, int slot);

/* --- change events ----------------------------------------------------------------------------------------------- */

struct tfs_change {
	tmb_u64 ino, dir; /* dir 0: not known, then there is no name */
	tmb_u32 mask;	  /* IN_*, as inotify(7) has them; with IN_ISDIR */
	tmb_u32 cookie;	  /* ties IN_MOVED_FROM to IN_MOVED_TO */
	tmb_u32 member;	  /* of a heard change: the member that made it */
	tmb_u32 name_len;
	char name[TFS_NAME_MAX + 1];
};
/* Returns whether another member watches changes: one load. Callers ask before they build a record. */
bool tfs_change_wanted(struct tfs *fs);
/* Tells the watching members. The skin's lock admits one thread of a member at a time. Returns the end of the record. */
tmb_u64 tfs_change_post(struct tfs *fs, const struct tfs_change *c);
/* Returns whether no watcher has read the record that ends there, so that it need not be repeated. Called after the change that it tells of. */
bool tfs_change_unheard(struct tfs *fs, tmb_u64 end);

struct tfs_listener {
	tmb_u64 at[TFS_MEMBERS];
	tmb_u32 from; /* the member whose ring is read next */
};
/* From now on other members tell this one their changes: TMB_PENDING_EVENT, and its doorbell. -EROFS for a read-only member. */
int tfs_listen_begin(struct tfs *fs, struct tfs_listener *l);
void tfs_listen_end(struct tfs *fs);
/* 1: the next change; 0: none now; -EOVERFLOW: some of a member's were lost, and the next call gives those that follow. */
int tfs_listen_next(struct tfs *fs, struct tfs_listener *l, struct tfs_change *c);

/* --- extended attributes (full names, "user.x") ---------------------------------------------------------- */

/* size 0: only the length. -ENODATA, -ERANGE. */
tmb_s64 tfs_xattr_get(struct tfs *fs, struct tfs_handle h, const char *name, void *value, tmb_u64 size);
/* Lists the names, each with its NUL. */
tmb_s64 tfs_xattr_list(struct tfs *fs, struct tfs_handle h, char *list, tmb_u64 size);
#define TFS_XATTR_CREATE 1u
#define TFS_XATTR_REPLACE 2u
#define TFS_XATTR_PERMISSIONS 4u /* of 'mode' only 0777 is taken: set-id bits and the sticky bit stay as they are when it changes ... */
#define TFS_XATTR_KILL_SGID 8u	 /* ... but S_ISGID is cleared */
/* value NULL: removes. mode >= 0: the inode's mode (07777) becomes it in the same transaction (ACLs). checked: as for tfs_setattr. */
int tfs_xattr_set(struct tfs *fs, struct tfs_handle h, const char *name, const void *value, tmb_u64 size, tmb_u32 flags, int mode,
		  const struct tfs_attr *checked, tmb_s64 now);

#endif
