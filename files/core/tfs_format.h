/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The file system's format in a zone's FILES area. Block numbers count 4 KiB from the start of the area.
 *
 *	block 0			struct tfs_super
 *	member_start		struct tfs_member_area[64]: per member transaction slots, read pins, counters
 *	map_start		block map: one byte per block of the area: its state
 *	data_start ...		inode table (a radix tree), directories, index nodes, file data
 *
 * Three mechanisms carry everything:
 *
 * Radix trees. Files, directories, hash indexes, extended attributes and the inode table are indexed like an MMU does
 * it: nodes of 512 entries of 8 bytes, each entry changed by one store, so a reader without a lock sees the old block or
 * the new one. An entry with TFS_ENTRY_HUGE, only in level-2 nodes, stands for 512 contiguous aligned blocks.
 *
 * Tags. A byte of the block map holds a block's state: 0 free; 1..64 the member id + 1 while an operation of that member uses it; TFS_MAP_USED when
 * something refers to it. A member tags a block before it links or unlinks it, so after its death the blocks with its tag are exactly those that its
 * recovery has to look at.
 *
 * Transactions. An operation lists what it must change together in a slot of its member: (offset, new value) words. Then it marks the slot
 * committed, then it stores the words. The recovery of a dead member repeats committed slots (the values are absolute, the locks still held) and
 * discards the others.
 *
 * All three rest on the order of stores. Where memory outlives its machine (TFS_RO_COMPAT_PERSISTENT), caches write back in any order, so members
 * flush their stores and wait: tags and the target of a new entry before the entry; the entry before its blocks count as used or free; a transaction
 * before its words; all of it before the transaction ends. An operation that returned is durable.
 */
#ifndef TFS_FORMAT_H
#define TFS_FORMAT_H

#include "tombolo_zone.h"

#define TFS_MAGIC 0x53464f4c4f424d54ULL /* "TMBOLOFS" */
#define TFS_VERSION 1
#define TFS_BLOCK 4096u
#define TFS_BLOCK_SHIFT 12
#define TFS_MEMBERS TMB_MAX_MEMBERS
#define TFS_ROOT_INO 1
#define TFS_NAME_MAX 255
#define TFS_SYMLINK_MAX 4095
#define TFS_LINK_MAX 1000000000u
#define TFS_XATTR_MAX 65536u /* one value, and all of one inode's attributes together with their headers ×2 */
#define TFS_MAX_HEIGHT 4
#define TFS_MAX_SIZE (1ULL << 47) /* largest file offset + 1 */

/* Block map bytes. */
#define TFS_MAP_FREE 0
#define TFS_MAP_RESERVED 0xfc /* free, but kept for removals: a removal may need one more node while the area is full */
#define TFS_MAP_DEFERRED 0xfd /* unlinked; a member in deferred_members may still map it, so freeing it is deferred */
#define TFS_MAP_META 0xfe  /* super block, member areas, the map itself */
#define TFS_MAP_USED 0xff

/* Tree entries: bits 0-47 block number (0: hole). Root words add the height in bits 48-51. */
#define TFS_BLOCKNR_MASK ((1ULL << 48) - 1)
#define TFS_ENTRY_HUGE (1ULL << 63)
#define TFS_HEIGHT_SHIFT 48
#define TFS_FANOUT 512u
#define TFS_FANOUT_SHIFT 9

#define TFS_RO_COMPAT_PERSISTENT 1ULL /* the memory outlives power: writers order their stores for that */

#define TFS_INCOMPAT_FAIR_LOCKS 1ULL /* lock words are as below */
#define TFS_INCOMPAT_FILE_LOCKS 2ULL /* a file's table of file locks has a lock of its own */
#define TFS_INCOMPAT_FREE_DEFERRAL 4ULL /* blocks are deferred without deferred_lock (reuse.c) */
#define TFS_INCOMPAT_ALL 7ULL	     /* a program of this version needs all of them, and adds those that are missing */
#define TFS_INCOMPAT_KEYED_HASH 8ULL /* names have a keyed hash (dir.c); file systems without it were made by older programs, and stay so */
#define TFS_INCOMPAT_KNOWN 15ULL
_Static_assert(TFS_INCOMPAT_KNOWN == (TFS_INCOMPAT_ALL | TFS_INCOMPAT_KEYED_HASH), "known features");

/*
 * The word of a struct tmb_lock in this area: as tombolo_zone.h defines lock words, with these bits in the tag. A word without an owner is free, and
 * may still have a turn and a count.
 */
#define TFS_LOCK_TAG 0xffffff00ULL
#define TFS_LOCK_KIND 0x300ULL
#define TFS_LOCK_HELD 0x100ULL
#define TFS_LOCK_OFFERED 0x200ULL /* the named member may take it; other members when it doesn't */
#define TFS_LOCK_DEMAND 0x400ULL  /* held: unlock offers it to the next member that waits instead of freeing it */
#define TFS_LOCK_TURN 0xff0000ULL /* the member it was last offered to, + 1 */
#define TFS_LOCK_COUNT 0xff000000ULL /* grows each time it is taken, after 255 to 1 */

struct tfs_super {
	tmb_u64 magic;
	tmb_u32 version;
	tmb_u32 block_size;
	tmb_u8 uuid[16];
	tmb_u64 blocks; /* in the area */
	tmb_u64 compat;
	tmb_u64 incompat;
	tmb_u64 ro_compat;
	/* 64 */
	tmb_u64 member_start; /* block */
	tmb_u64 member_blocks; /* per member */
	tmb_u64 map_start;    /* block */
	tmb_u64 data_start;   /* first allocatable block, multiple of 512 where the area is large enough */
	tmb_u64 hash_seed; /* no program without privileges learns it */
	tmb_u64 created_ns;
	tmb_u64 area_offset;  /* of this area in its zone */
	tmb_u64 pad0;
	/* 128 */
	char label[32];
	tmb_u64 pad1[4];
	/* 192: inode table */
	tmb_u64 itable_root;
	tmb_u64 itable_inodes; /* inodes that exist (free or not); multiple of 16 */
	struct tmb_lock itable_lock;
	tmb_u64 pad2[4];
	/* 256: renames of directories to another directory, one at a time */
	struct tmb_lock rename_lock;
	tmb_u64 rename_seq;
	tmb_u64 pad3[5];
	/* 320: freeze for snapshots; errors; change events; deferred blocks */
	tmb_u64 freeze;	  /* a lock word: the member that froze it; 0: not frozen */
	tmb_u64 errors;	  /* damage seen since the last fsck */
	tmb_u64 watchers; /* bit per member that wants to hear of changes */
	tmb_u64 deferred_members; /* bit per member that may still look at deferred blocks; when it is 0 they become free */
	struct tmb_lock deferred_lock; /* of a member that frees deferred blocks */
	tmb_u64 pad4[2];
	tmb_u8 pad5[4096 - 384];
};
_Static_assert(sizeof(struct tfs_super) == TFS_BLOCK, "super size");
_Static_assert(offsetof(struct tfs_super, label) == 128, "label");
_Static_assert(offsetof(struct tfs_super, itable_root) == 192, "itable");
_Static_assert(offsetof(struct tfs_super, rename_lock) == 256, "rename");
_Static_assert(offsetof(struct tfs_super, freeze) == 320, "freeze");
_Static_assert(offsetof(struct tfs_super, deferred_lock) == 352, "deferred");

/* Inode states, bits 0-7 of state_gen. */
#define TFS_INODE_FREE 0
#define TFS_INODE_NEW 1	 /* bits 8-15: id + 1 of the member that creates it, or frees it: then bits 16-23 are its transaction's slot + 1 */
#define TFS_INODE_LIVE 2
#define TFS_GEN_SHIFT 32

/* Inode flags: as FS_IOC_GETFLAGS has them. */
#define TFS_FL_IMMUTABLE 0x10u
#define TFS_FL_APPEND 0x20u

struct tfs_inode {
	/* 0: identity and rights; readers' line */
	tmb_u64 state_gen; /* state, creator, bits 32-63 generation */
	tmb_u64 mode;	   /* S_IFMT and permission bits */
	tmb_u64 owner;	   /* uid, gid << 32 */
	tmb_u64 nlink;
	tmb_u64 flags;
	tmb_u64 rdev;	    /* major << 20 | minor */
	tmb_u64 parent;	    /* directories: the inode number of ".." */
	tmb_u64 xattr_root; /* tree over one image of all attributes, replaced whole */
	/* 64: data */
	tmb_u64 root;
	tmb_u64 size;	    /* bytes; directories: bytes in use by blocks of entries; symlinks: length */
	tmb_u64 blocks;	    /* data and node blocks, a statistic */
	tmb_u64 seq;	    /* directories: odd while entries change; grows by 2 with each change */
	tmb_u64 index_root; /* directories: hash table; bits 52-57 log2 of its entries; 0: none, lookups scan */
	tmb_u64 index_used; /* entries and tombstones in it */
	tmb_u64 entries;    /* directories: names other than "." and ".."; other types: with the next word the lock of the table 'locks' */
	tmb_u64 free_granules; /* directories: a statistic: free granules */
	/* 128: times, ns since 1970, signed */
	tmb_s64 atime;
	tmb_s64 mtime;
	tmb_s64 ctime;
	tmb_s64 btime;
	tmb_u64 version; /* grows with each change of data or attributes */
	tmb_u64 hole_mappers; /* bit per member, of those in 'mappers', that may show zeroes where there are holes */
	tmb_u64 unsynced; /* persistent memory: grows with each mapping; 0: all that was stored through mappings is written back */
	tmb_u64 pad0[1];
	/* 192: shared state */
	struct tmb_lock lock;
	tmb_u64 openers;  /* bit per member that has it open */
	tmb_u64 mappers;  /* bit per member that may have its blocks mapped or pinned */
	tmb_u64 map_seq;  /* grows when blocks are unlinked */
	tmb_u64 locks;	  /* root word of a tree of file-lock records (struct tfs_lock_record) */
	tmb_u64 account;  /* number + 1 of the account that it counts for; 0: none */
	tmb_u64 dir_hint; /* directories: block where the next search for space starts */
};
_Static_assert(sizeof(struct tfs_inode) == 256, "inode size");
_Static_assert(offsetof(struct tfs_inode, root) == 64, "root");
_Static_assert(offsetof(struct tfs_inode, atime) == 128, "atime");
_Static_assert(offsetof(struct tfs_inode, lock) == 192, "lock");
_Static_assert(offsetof(struct tfs_inode, entries) == 112 && offsetof(struct tfs_inode, free_granules) == 120, "lock of file locks");
#define TFS_INODES_PER_BLOCK (TFS_BLOCK / 256u)
#define TFS_INDEX_LOG_SHIFT 52

/*
 * Directory blocks: 64 granules of 64 bytes. An entry takes 'granules' of them and does not cross a block; with ref 0 it
 * is free space. Entries never move, so a position (granule number) is a stable readdir cookie.
 */
#define TFS_GRANULE 64u
#define TFS_GRANULES_PER_BLOCK (TFS_BLOCK / TFS_GRANULE)
struct tfs_dirent {
	tmb_u64 ref; /* inode number in bits 0-47, DT_* in bits 56-63; 0: free. One word, so both change at once; stored last */
	tmb_u32 hash;
	tmb_u8 name_len;
	tmb_u8 granules; /* 1..5, or the length of a free run, up to 64 */
	tmb_u8 pad[2];
	char name[TFS_GRANULE - 16]; /* not terminated; goes on in the following granules */
};
_Static_assert(sizeof(struct tfs_dirent) == TFS_GRANULE, "dirent size");
#define TFS_DIRENT_HEADER 16u
#define TFS_REF_INO_MASK ((1ULL << 48) - 1)
#define TFS_REF_TYPE_SHIFT 56

/* Hash index: hash << 32 | granule number + 1; 0 empty, TFS_INDEX_TOMB deleted. */
#define TFS_INDEX_TOMB 0xffffffffULL

/* Extended attributes: an image of headers, each followed by name and value, padded to 8; ends at 'bytes'. */
struct tfs_xattr_image {
	tmb_u32 bytes; /* of the image with this header */
	tmb_u32 count;
};
struct tfs_xattr_entry {
	tmb_u16 name_len; /* full name with prefix, "user.x" */
	tmb_u16 pad;
	tmb_u32 value_len;
};
_Static_assert(sizeof(struct tfs_xattr_entry) == 8, "xattr entry size");

/* Transactions. */
#define TFS_TX_SLOTS 32u
#define TFS_TX_RECOVERY (TFS_TX_SLOTS - 1) /* for recoveries only: threads with the other slots may wait for one */
#define TFS_TX_WORDS 24u
#define TFS_TX_INODES 5u
#define TFS_TX_ITABLE (~0ULL) /* in place of an inode number: the inode table's own tree */
#define TFS_TX_FREE 0
#define TFS_TX_OPEN 1	   /* blocks and inodes may carry the member's tag */
#define TFS_TX_COMMITTED 2 /* 'words' are being stored */

/* Work that follows the words, and can be repeated. */
#define TFS_REDO_NONE 0
#define TFS_REDO_TRUNCATE 1 /* remove blocks of ino[0] from block arg[0] on, up to arg[1] */
#define TFS_REDO_FREE 2	    /* ino[0] has no link and no opener: free it */
#define TFS_REDO_TRIM 3	    /* also of an open transaction: blocks arg[0] to arg[1] past ino[0]'s size are of a write that did not return */

struct tfs_tx_word {
	tmb_u64 offset; /* bytes from the start of the area, multiple of 8 */
	tmb_u64 value;
};
struct tfs_tx {
	tmb_u64 state; /* bits 0-7 TFS_TX_*, bits 32-63 the member's epoch */
	tmb_u32 redo;
	tmb_u32 n_words;
	tmb_u64 ino[TFS_TX_INODES]; /* inodes whose trees may hold tagged blocks; 0: none */
	tmb_u64 arg[2];
	tmb_u64 spare[2]; /* TFS_REDO_TRUNCATE: blocks with the member's tag, for nodes that it may need; 0: none */
	tmb_u64 pad[5];
	struct tfs_tx_word words[TFS_TX_WORDS];
};
_Static_assert(sizeof(struct tfs_tx) == 512, "tx size");
_Static_assert(offsetof(struct tfs_tx, words) == 128, "tx words");

/* Read pins: the number of the inode whose blocks a reader copies, 0: none. One cache line each. */
#define TFS_PINS 64u
struct tfs_pin {
	tmb_u64 ino;
	tmb_u64 pad[7];
};

/*
 * File locks (flock, fcntl): records in blocks of the inode's tree 'locks', changed under the table's lock (a directory's own). The record of a
 * holder whose epoch has ended is void. A waiter stores its wait in its member area, for deadlock detection.
 */
#define TFS_LK_READ 1u
#define TFS_LK_WRITE 2u
#define TFS_LK_UNLOCK 3u
#define TFS_LK_POSIX 1u /* by byte range; owner: a process or an open file description */
#define TFS_LK_FLOCK 2u /* whole file; owner: an open file description */
struct tfs_lock_record {
	tmb_u64 holder; /* a lock word (member, epoch); 0: free record; stored last */
	tmb_u64 owner;	/* the lock's owner within the holding member */
	tmb_u64 start, end; /* bytes, end inclusive */
	tmb_u32 type, kind;
	tmb_u32 pid, pad0;
	tmb_u64 order; /* grows from owner to owner, in the order of arrival; all records of an owner have the same */
	tmb_u64 pad1;
};
_Static_assert(sizeof(struct tfs_lock_record) == 64, "lock record size");
#define TFS_LOCK_RECORDS (TFS_BLOCK / 64u) /* per block; the first place of block 0 is the head */
struct tfs_lock_head {
	tmb_u64 waiters; /* bit per member that waits for one of these locks */
	tmb_u64 blocks;	 /* of records */
	tmb_u64 orders;	 /* the last 'order' given to an owner */
	tmb_u64 pad[5];
};
_Static_assert(sizeof(struct tfs_lock_head) == 64, "lock head size");
#define TFS_LOCK_WAITS 32u
struct tfs_lock_wait {
	tmb_u64 ino; /* 0: free; stored last */
	tmb_u64 owner, start, end;
	tmb_u32 type, claimed;
	tmb_u64 pad[3];
};
_Static_assert(sizeof(struct tfs_lock_wait) == 64, "lock wait size");

/*
 * Change events, for watchers (inotify, fanotify) in other members. Each member has a ring that only it writes; positions count bytes since the
 * beginning. A writer writes a record, then moves the head past it; a reader copies a record, then checks that the head has not passed it by a whole
 * ring. Writers wait for no reader: a reader that falls behind by a ring loses records and knows it.
 */
#define TFS_CHANGE_RING 16384u
#define TFS_CHANGE_UNIT 32u /* records are multiples of it, so a header never wraps */
struct tfs_change_record {
	tmb_u64 ino; /* 0: nothing, skip 'length' bytes to the ring's end */
	tmb_u64 dir; /* the directory that it happened in; 0: not known */
	tmb_u32 mask; /* IN_*, as inotify(7) has them */
	tmb_u32 cookie;
	tmb_u16 length; /* of the record with its name */
	tmb_u8 name_len;
	tmb_u8 pad[5];
};
_Static_assert(sizeof(struct tfs_change_record) == TFS_CHANGE_UNIT, "change record size");
#define TFS_CHANGE_MAX ((sizeof(struct tfs_change_record) + TFS_NAME_MAX + TFS_CHANGE_UNIT - 1) / TFS_CHANGE_UNIT * TFS_CHANGE_UNIT)

/*
 * An account: blocks and inodes that are counted and limited together. An inode counts for the account of the member that created it, whichever
 * member fills it later. Bound by name, since member slots are used again.
 */
struct tfs_account {
	char name[32]; /* NUL padded; empty: free */
	tmb_s64 blocks, inodes;
	tmb_u64 blocks_limit, inodes_limit; /* 0: none */
};
_Static_assert(sizeof(struct tfs_account) == 64, "account size");
#define TFS_ACCOUNTS TFS_MEMBERS /* number a lies in member area a */

struct tfs_member_area {
	struct tfs_tx tx[TFS_TX_SLOTS]; /* 16 KiB */
	struct tfs_pin pins[TFS_PINS];	/* 4 KiB */
	tmb_s64 inodes_used; /* the sum over all members counts; one member's may be negative */
	tmb_s64 pad0;
	tmb_u64 pins_in_use; /* slots that this member has ever taken are below this */
	tmb_u64 root;	     /* the directory that it is confined to; 0: none. The host sets it */
	tmb_u64 account;     /* number + 1 of the account for what it creates; 0: none. The host sets it */
	tmb_u64 kept_for;    /* of older programs: bit per member that may look at blocks with this member's tag that no transaction names */
	tmb_u64 features;    /* which of TFS_INCOMPAT_ALL this member's program knows; bits 32-63: the epoch in which it declared them */
	tmb_u64 root_generation; /* of 'root', whose number another directory may get; 0: any, of older programs */
	struct tfs_account own; /* the account with this area's number, whichever members bear it */
	struct tfs_lock_wait waits[TFS_LOCK_WAITS];
	tmb_u64 heard[TFS_MEMBERS]; /* how far this member has read the rings of the other members */
	tmb_u64 change_head;	    /* bytes ever written to the ring */
	tmb_u64 revokes_begun;	    /* times that it began to revoke mappings on request */
	tmb_u64 revokes_done;	    /* the last of these that has ended: no mapping from before its beginning is left */
	tmb_u64 pad2[173];
	tmb_u8 changes[TFS_CHANGE_RING];
};
_Static_assert(sizeof(struct tfs_member_area) == 40960, "member area size");
_Static_assert(offsetof(struct tfs_member_area, changes) == 24576, "changes");
#define TFS_MEMBER_BLOCKS (sizeof(struct tfs_member_area) / TFS_BLOCK)

#endif
