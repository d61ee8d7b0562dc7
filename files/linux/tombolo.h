/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The Linux kernel's skin of the file system: declarations that its files share.
 *
 *	super.c	 mounting: options, super block, inode allocation, statfs
 *	calls.c	 zones for accelerator calls: which of them are joined
 *	hibernate.c refuses a hibernation while a zone is in use
 *	zone.c	 finding a zone among the pmem devices, its checked geometry, joining and leaving as a member
 *	inode.c	 VFS inodes: identity, refreshing from the zone, attributes, openers' references
 *	dir.c	 names: lookup and its validation, create, link, rename, readdir
 *	file.c	 data: read, write, seek, fallocate, truncate
 *	export.c file handles
 *	mmap.c	 faults, and taking mappings back when another member removes blocks
 *	lock.c	 flock and fcntl locks
 *	notify.c inotify and fanotify across members
 *	xattr.c	 extended attributes; acl.c: POSIX ACLs on top of them
 *	os.c	 what the core needs (tfs_os.h)
 *	compat.h differences between kernels
 *
 * No cached state of the VFS is trusted: dentries carry the directory's sequence number at which they were valid, inodes are refreshed from
 * the zone before their fields are used, ACLs are not cached, and there is no page cache. Locks: the VFS's own first (i_rwsem, then
 * mapping->invalidate_lock), then the core's lock of the inode. A page fault never waits for the core's lock with invalidate_lock held,
 * because the owner of the core's lock may be waiting for this member's mappings.
 */
#ifndef TOMBOLO_LINUX_H
#define TOMBOLO_LINUX_H

#include <linux/dax.h>
#include <linux/fs.h>
#include <linux/kernel.h>
#include <linux/mutex.h>
#include <linux/siphash.h>
#include <linux/spinlock.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

#include "compat.h"
#include "doorbell.h"
#include "syncdev.h"
#include "tfs.h"

#define TMB_SUPER_MAGIC 0x4f424d54 /* "TMBO" */

/* A zone attached through a pmem block device, or by a descriptor of its memory (zone.memory; then there is no device). */
struct tmb_zone {
	struct file *memory;  /* held open: its lock of the member's slot lives as long as the mount */
	struct page **frames; /* with memory: its pinned pages; NULL: the frames from pfn on */
	unsigned long frame_count;
	struct tmb_bdev dev;
	struct dax_device *dax;
	struct dev_pagemap *pages; /* of the memory; the reference keeps it mapped */
	u64 dax_start;	 /* of the block device in the DAX device, bytes */
	u8 *addr;	 /* kernel address of the zone's first byte */
	unsigned long pfn; /* its page frame */
	u64 size;	 /* checked: of the zone, not beyond the device */
	u8 uuid[16];
	char name[TMB_NAME_LEN + 1];
	u64 files_offset, files_length;
	u64 sync_offset, sync_length; /* 0: no such area */
	u64 calls_offset, calls_length;
	struct tmb_member *members;
};

struct tmb_sb {
	struct tfs fs; /* fs.os points back here */
	struct super_block *sb;
	struct tmb_zone zone;
	dev_t dev;	      /* the zone's, or of its memory … */
	unsigned long number; /* … the inode there; else 0 */
	bool joined, opened, listening;
	bool ending;  /* being unmounted: waits for other members' locks are short */
	bool may_write; /* the host's grant; fs.read_only: the mount's option */
	struct tmb_doorbell_client doorbell;
	struct tmb_syncdev *sync; /* semaphores of this zone for processes; NULL: none */
	atomic_t rings;	/* counts doorbells, for threads that sleep in tfs_os_wait */
	wait_queue_head_t rung;
	siphash_key_t lock_key;
	/* mapped inodes, for revokes */
	spinlock_t mapped_lock;
	struct list_head mapped; /* each is open, or lingers: none is evicted while it is here */
	atomic_t lingering;	 /* how many of them are closed, but have pages in use */
	bool keeping;		 /* the last round found pages in use that another member has removed */
	struct workqueue_struct *work_queue; /* never waits for another member's lock, whose owner may be waiting for this queue */
	struct delayed_work poll;
	/* work that may wait for other members; each item by itself */
	struct workqueue_struct *lock_queue;
	struct work_struct recovery;
	spinlock_t closing_lock;
	struct list_head closing; /* references to give back in the zone */
	wait_queue_head_t closed; /* one has been given back */
	spinlock_t unlocking_lock;
	struct list_head unlocking; /* file locks that are to be released once their table can be locked */
	/* change events */
	struct mutex changes_lock; /* one writer of events at a time; the beginning and end of listening */
	u32 change_cookie;
	bool hearing;
	struct tfs_listener listener;	/* the worker's, while it listens */
	struct tfs_change heard;	/* the worker's */
	u32 heard_member, heard_cookie, heard_as; /* the last rename's */
	struct delayed_work unwatch;
};

struct tmb_inode {
	u32 generation;
	struct tfs_attr seen; /* by the last refresh; changes with i_lock */
	u64 modify_told; /* the end of the last event about a change of its data */
	struct mutex lock; /* the members below */
	u32 opens;
	bool referenced;   /* tfs_open_ref is held */
	/* directories: between these sequence numbers only this kernel changed names, and it updated their dentries */
	u64 own_from, own_to;
	/* mapping: 'mapped' and 'runs' change with invalidate_lock held (shared: to true; exclusive: to false) */
	bool mapped;
	u64 map_seq;
	struct xarray runs; /* page offset -> block << 1 | huge, of what dax may have mapped */
	struct xarray displaced; /* block -> block << 1 | huge, of what is mapped no more, but was in use when the file had another block there */
	struct xarray aside; /* block -> fs/dax's entry of what is in 'displaced', from 6.15 on */
	unsigned long revoked_at; /* jiffies */
	bool shows_holes, told_holes; /* zeroes may be mapped where there are holes; and the zone's bit is set */
	unsigned long pinned_at; /* in 'runs': where a page was in use at the last look */
	struct list_head mapped_link;
	struct mutex map_lock; /* serializes map_reference(); its holder waits for no other member */
	struct tmb_linger *lingers; /* closed while its pages are in use: the references that keep it; changes with invalidate_lock held */
	struct mutex fault_lock; /* one allocation for a fault at a time */
#if TMB_PAGES_APART
	struct address_space pages; /* fs/dax's entries of what is mapped; empty unless 'mapped' */
#endif
	struct inode vfs;
};

static inline struct tmb_sb *tmb_sb(const struct super_block *sb)
{
	return sb->s_fs_info;
}
static inline struct tfs *tmb_fs(const struct inode *inode)
{
	return &tmb_sb(inode->i_sb)->fs;
}
static inline struct tmb_inode *tmb_i(const struct inode *inode)
{
	return container_of(inode, struct tmb_inode, vfs);
}

/* The mapping that mapped pages of the inode belong to. The invalidate_lock is that of i_mapping. */
static inline struct address_space *tmb_pages(struct inode *inode)
{
#if TMB_PAGES_APART
	return &tmb_i(inode)->pages;
#else
	return inode->i_mapping;
#endif
}

static inline struct tfs_handle tmb_h(const struct inode *inode)
{
	return (struct tfs_handle){ .ino = inode->i_ino, .generation = tmb_i(inode)->generation };
}

/* calls.c */
void tmb_calls_exit(void);

/* hibernate.c */
bool tmb_zone_use(void);
void tmb_zone_unuse(void);
int tmb_hibernate_init(void);
void tmb_hibernate_exit(void);

/* zone.c */
int tmb_zone_find(const char *source, struct tmb_zone *zone, char **path);
int tmb_zone_attach_memory(struct tmb_zone *zone, struct file *memory);
int tmb_zone_attach(struct tmb_zone *zone, const char *path, void *holder);
void tmb_zone_detach(struct tmb_zone *zone, void *holder);
int tmb_zone_join(struct tmb_zone *zone, int wanted, u32 doorbell, bool read_only, u32 *member, u32 *epoch, bool *writable, bool *joined);
void tmb_zone_leave(struct tmb_zone *zone, u32 member, u32 epoch);

/* inode.c */
extern const struct inode_operations tmb_file_iops, tmb_symlink_iops, tmb_special_iops;
struct inode *tmb_iget(struct super_block *sb, struct tfs_handle h);
int tmb_refresh(struct inode *inode);
void tmb_refresh_size(struct inode *inode);
int tmb_refresh_to(struct inode *inode, struct tfs_attr *a);
bool tmb_check_again(int *err, unsigned int *tries);
int tmb_hold(struct inode *inode);
void tmb_unhold(struct inode *inode);
int tmb_reference(struct inode *inode);
void tmb_unreference(struct inode *inode);
int tmb_hold_unlinked(struct dentry *dentry);
int tmb_open_inode(struct inode *inode, struct file *file);
int tmb_release_inode(struct inode *inode, struct file *file);
void tmb_evict_inode(struct inode *inode);
void tmb_closing_start(struct tmb_sb *s);
int tmb_getattr(tmb_idmap *idmap, const struct path *path, struct kstat *stat, u32 mask, unsigned int flags);
int tmb_setattr(tmb_idmap *idmap, struct dentry *dentry, struct iattr *attr);
int tmb_permission(tmb_idmap *idmap, struct inode *inode, int mask);
#if TMB_HAS_UPDATE_TIME_NOW
int tmb_update_time(struct inode *inode, struct timespec64 *now, int flags);
#elif TMB_HAS_UPDATE_TIME_FLAGS
int tmb_update_time(struct inode *inode, int flags);
#else
int tmb_update_time(struct inode *inode, enum fs_update_time what, unsigned int flags);
#endif
int tmb_fileattr_get(struct dentry *dentry, tmb_fileattr *fa);
int tmb_fileattr_set(tmb_idmap *idmap, struct dentry *dentry, tmb_fileattr *fa);

/* dir.c */
extern const struct inode_operations tmb_dir_iops;
extern const struct file_operations tmb_dir_fops;
extern const struct dentry_operations tmb_dentry_ops;

/* file.c */
extern const struct file_operations tmb_file_fops;
int tmb_truncate(struct inode *inode, loff_t size, bool kill_suid);
int tmb_fiemap(struct inode *inode, struct fiemap_extent_info *info, u64 start, u64 length);

/* export.c */
extern const struct export_operations tmb_export_ops;

/* lock.c */
int tmb_lock(struct file *file, int cmd, struct file_lock *fl);
int tmb_flock(struct file *file, int cmd, struct file_lock *fl);
void tmb_locks_start(struct tmb_sb *s);

/* notify.c; masks as inotify has them (FS_*) */
void tmb_tell(struct dentry *dentry, u32 mask);
void tmb_tell_inode(struct inode *inode, u32 mask);
void tmb_tell_name(struct inode *dir, const struct qstr *name, struct inode *inode, u32 mask);
void tmb_tell_move(struct inode *old_dir, const struct qstr *old, struct inode *new_dir, const struct qstr *new, struct inode *inode);
void tmb_expect_watch(struct tmb_sb *s);
bool tmb_changes_hear(struct tmb_sb *s);
void tmb_changes_start(struct tmb_sb *s);
void tmb_changes_stop(struct tmb_sb *s);

/* mmap.c */
extern const struct address_space_operations tmb_aops;
int tmb_mmap(struct file *file, struct vm_area_struct *vma);
bool tmb_opened_for_mapping(const struct file *file);
void tmb_hush(struct file *file);
void tmb_release_mappings(struct file *file);
void tmb_pages_init_once(struct inode *inode);
void tmb_pages_init(struct inode *inode);
int tmb_revoke_locked(struct inode *inode);
void tmb_mappings_close(struct inode *inode);
void tmb_holes_filled(struct inode *inode, loff_t pos, loff_t length);
int tmb_mappings_init(void);
void tmb_mappings_exit(void);
void tmb_mappings_start(struct tmb_sb *s);
void tmb_mappings_stop(struct tmb_sb *s);
void tmb_mappings_look(struct tmb_sb *s);

/* xattr.c, acl.c */
extern const struct xattr_handler *const tmb_xattr_handlers[];
ssize_t tmb_listxattr(struct dentry *dentry, char *list, size_t size);
#if TMB_HAS_ACL_BY_DENTRY
int tmb_set_acl(tmb_idmap *idmap, struct dentry *dentry, struct posix_acl *acl, int type);
#define TMB_ACL_OPS .get_inode_acl = tmb_get_acl, .set_acl = tmb_set_acl
#else
int tmb_set_acl(tmb_idmap *idmap, struct inode *inode, struct posix_acl *acl, int type);
#define TMB_ACL_OPS .get_acl = tmb_get_acl, .set_acl = tmb_set_acl
#endif
struct posix_acl *tmb_get_acl(struct inode *inode, int type, bool rcu);
/* The attributes that a new inode under 'dir' starts with, as a struct tfs_xattr_image; *mode gets what the ACL says. *image NULL: none. */
int tmb_initial_xattrs(struct inode *dir, umode_t *mode, void **image, u32 *length);

/* os.c */
s64 tmb_to_ns(struct timespec64 ts);

#endif
